// Kernels of torch's dispatcher for the operations: a call whose specialization key is known is
// launched from here, any other one goes on to Python.
//
// The specialization key of a call is its operation, the shapes, dtypes, devices and orders in
// memory of its tensors, and its other arguments. A call whose key is not known runs the
// operation's fallback, the same operation in Python; when that returns, Python may have offered
// the launch plan of the call: then its key is known.
//
// Python decides wherever it may have an opinion: options other than the process's, calls that are
// noted instead of run, a profiler, tensors that require a gradient, input that a kernel refuses.
// All that is read here was checked when the key was new.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "launch_plan.h"

extern "C" {  // of the interpreter that loads this, whose headers need not be installed
struct _object;
int PyGILState_Ensure();
void PyGILState_Release(int);
int PyContextVar_Get(_object* var, _object* otherwise, _object** value);
void Py_DecRef(_object*);
}

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // of graph_task.h, which has much else
}

namespace {

using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using i64 = std::int64_t;
using u64 = std::uint64_t;

constexpr std::size_t MOST = 1024;  // keys that are known at once
constexpr i64 KEPT =
    i64(1) << 28;  // bytes of workspace, at most, that a thread keeps between its calls on the CPU
constexpr i64 PIECE = 1 << 20;         // bytes: what a workspace is a multiple of
constexpr std::uintptr_t VECTOR = 16;  // bytes that CUDA's kernels load at once
constexpr std::size_t MOST_MAPS = 2;   // that a kernel takes
constexpr unsigned COUNTERS = 256;     // threads that count the rows of groups

// Specialization keys
// -------------------------------------------------------------------------------------------------

// The specialization key of a call as words, and its tensors.
class Key {
  public:
    std::vector<u64> words;
    c10::SmallVector<const at::Tensor*, 16> tensors;

    // Whether a value can be told from all others.
    bool add(const IValue& v) {
        if (v.isTensor()) return add(v.toTensor());
        if (v.isNone()) return add(NONE, 0);
        if (v.isInt()) return add(INT, 0, static_cast<u64>(v.toInt()));
        if (v.isBool()) return add(BOOL, v.toBool());
        if (v.isDouble()) return add(DOUBLE, 0, of_bits(v.toDouble()));
        if (v.isString()) return add(v.toStringRef());
        if (!v.isList()) return false;
        const auto elements = v.toListRef();
        add(LIST, elements.size());
        for (const IValue& element : elements)
            if (!add(element)) return false;
        return true;
    }

    // Whether the storage of each tensor holds all of its elements. Wrappers such as FSDP free that
    // of parameters.
    bool in_memory() const {
        return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor* t) {
            if (t->numel() == 0) return true;
            i64 last = t->storage_offset();
            for (i64 d = 0; d < t->dim(); ++d) last += (t->size(d) - 1) * t->stride(d);
            return static_cast<std::size_t>(last + 1) * t->itemsize() <= t->storage().nbytes();
        });
    }

  private:
    enum Tag : u64 { NONE, INT, BOOL, DOUBLE, STRING, LIST, TENSOR };

    bool add(Tag tag, u64 what) {
        words.push_back(tag | what << 8);
        return true;
    }

    bool add(Tag tag, u64 what, u64 more) {
        words.push_back(more);
        return add(tag, what);
    }

    bool add(const std::string& s) {
        const std::size_t at = words.size();
        words.resize(at + (s.size() + 7) / 8);
        std::memcpy(words.data() + at, s.data(), s.size());
        return add(STRING, s.size());
    }

    bool add(const at::Tensor& t) {
        if (!t.defined() || t.layout() != at::kStrided) return false;
        const bool contiguous = t.is_contiguous();
        for (const i64 n : t.sizes()) words.push_back(static_cast<u64>(n));
        if (!contiguous)
            for (const i64 n : t.strides()) words.push_back(static_cast<u64>(n));
        const c10::Device on = t.device();
        const u64 device = static_cast<u64>(static_cast<std::uint8_t>(on.index()) << 8 |
                                            static_cast<std::uint8_t>(on.type()));
        tensors.push_back(&t);
        return add(TENSOR, static_cast<u64>(t.dim()) << 32 | device << 16 |
                               static_cast<u64>(t.scalar_type()) << 1 | contiguous);
    }

    static u64 of_bits(double v) {
        u64 bits;
        std::memcpy(&bits, &v, sizeof bits);
        return bits;
    }
};

// Launch plans
// -------------------------------------------------------------------------------------------------

using Numbers = NumbersOf<i64>;

// Recording
// -------------------------------------------------------------------------------------------------

// What is counted of the calls of a layer, known by the address of its weight, in memory of the
// device that runs it: rows of each group, of all calls and of the last `capacity` ones.
struct Layer {
    enum : i64 { IGNORED, COUNTED, OF_PYTHON };
    const void* weight;
    i64 how, groups, capacity;
    i64 *calls, *times, *totals;
    std::int32_t* rows;
};

struct Layers {    // as recorder/counts.py makes it
    void* kernel;  // that counts on a GPU
    i64 count;
    Layer of[];
};

std::atomic<const Layers*> recorded{nullptr};

// The same as the kernel of recorder/count.cu.
void count(const Layer& layer, const std::int32_t* ends) {
    const i64 n = __atomic_fetch_add(layer.calls, 1, __ATOMIC_RELAXED) % layer.capacity;
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    layer.times[n] = now.tv_sec * 1'000'000'000 + now.tv_nsec;
    for (i64 g = 0; g < layer.groups; ++g) {
        const std::int32_t rows = ends[g] - (g == 0 ? 0 : ends[g - 1]);
        layer.rows[n * layer.groups + g] = rows;
        __atomic_fetch_add(layer.totals + g, rows, __ATOMIC_RELAXED);
    }
}

// Handles
// -------------------------------------------------------------------------------------------------

// The tables that handles stand for, as their owners have them (handles.py).
class Shared {
  public:
    struct Table {
        char* at;
        i64 count, owner;
    };

    void put(const void* handle, Table table) {
        const std::unique_lock lock(mutex_);
        if (table.at)
            tables_[handle] = table;
        else
            tables_.erase(handle);
    }

    // The table of a tensor; null unless it is a handle of this owner's.
    char* find(const at::Tensor& handle, i64 owner) {
        const std::shared_lock lock(mutex_);
        const auto entry = tables_.find(handle.const_data_ptr());
        const bool good = entry != tables_.end() && entry->second.owner == owner &&
                          entry->second.count == handle.numel();
        return good ? entry->second.at : nullptr;
    }

  private:
    std::shared_mutex mutex_;
    std::unordered_map<const void*, Table> tables_;
};

Shared& shared() {
    static Shared* const all = new Shared;  // as long as the process
    return *all;
}

struct Result {
    std::vector<i64> sizes;
    at::ScalarType dtype;
};

using Results = std::vector<at::Tensor>;

// What calls with one specialization key launch. Its arrays are numbered: those of its tensors,
// those of its results, those inside of its workspace.
class LaunchPlan {
  public:
    explicit LaunchPlan(Numbers& reader) : arrays_(reader) {}
    virtual ~LaunchPlan() = default;

    // Takes shapes and dtypes of the results for those to come. Whether they are as this plan makes
    // them.
    bool fits(std::size_t inputs, const Results& results) {
        if (inputs == 0 || inputs != static_cast<std::size_t>(arrays_.inputs) ||
            results.size() != arrays_.made.size())
            return false;
        for (const at::Tensor& t : results) {
            if (!t.defined() || !t.is_contiguous()) return false;
            results_.push_back({t.sizes().vec(), t.scalar_type()});
        }
        return true;
    }

    // Whether the call ran; if not, Python is to run it. layer: whose calls are counted, or null.
    virtual bool run(const Key& key, const Layer* layer, Results& results) const = 0;

    // Finds the layer of a call while a run is recorded; false if Python is to run it. A backward
    // counts nothing: it may compute the forward again.
    bool find(const Key& key, const Layer*& layer) const {
        const Layers* const all = recorded.load(std::memory_order_acquire);
        if (!all || weight_ < 0 || torch::autograd::get_current_graph_task_id() != -1) return true;
        const void* const weight = key.tensors[static_cast<std::size_t>(weight_)]->const_data_ptr();
        const Layer* const end = all->of + all->count;
        const Layer* const at =
            std::find_if(all->of, end, [=](const Layer& l) { return l.weight == weight; });
        if (at == end || at->how == Layer::OF_PYTHON || ends_ < 0) return false;
        if (at->how == Layer::COUNTED) layer = at;
        return true;
    }

  protected:
    using Addresses = c10::SmallVector<char*, 32>;

    // Those of all arrays; none if a tensor should be a handle, and is not. of_results(result)
    // makes a tensor.
    template <class Make>
    Addresses addresses(const Key& key, Results& results, char* workspace, Make of_result) const {
        Addresses arrays;
        for (const at::Tensor* t : key.tensors)
            arrays.push_back(static_cast<char*>(const_cast<void*>(t->const_data_ptr())));
        for (std::size_t i = 0; i < handles_.size(); i += 2) {
            const auto input = static_cast<std::size_t>(handles_[i]);
            arrays[input] = shared().find(*key.tensors[input], handles_[i + 1]);
            if (!arrays[input]) return {};
        }
        for (const Result& result : results_) results.push_back(of_result(result));
        for (const i64 i : arrays_.made)
            arrays.push_back(
                static_cast<char*>(results[static_cast<std::size_t>(i)].mutable_data_ptr()));
        for (const i64 offset : arrays_.offsets) arrays.push_back(workspace + offset);
        return arrays;
    }

    i64 workspace() const { return arrays_.workspace; }

    // Ends a plan: the input that is the weight of the first product, and the array of its
    // groups' ends, -1 for none; the inputs that are handles, each with the owner.
    void read_last(Numbers& reader) {
        weight_ = reader.next(), ends_ = reader.next(), handles_ = reader.list();
    }

    std::int32_t* ends(const Addresses& arrays) const {
        return reinterpret_cast<std::int32_t*>(arrays[static_cast<std::size_t>(ends_)]);
    }

  private:
    i64 weight_ = -1, ends_ = -1;
    std::vector<i64> handles_;
    ArraysOf<i64> arrays_;
    std::vector<Result> results_;
};

// One call of a program's entry.
class OnCpu final : public LaunchPlan {
  public:
    explicit OnCpu(Numbers& reader) : LaunchPlan(reader), function_(reader) { read_last(reader); }

    bool run(const Key& key, const Layer* layer, Results& results) const override {
        at::Tensor held;
        const auto make = [](const Result& r) { return at::detail::empty_cpu(r.sizes, r.dtype); };
        const Addresses arrays = addresses(key, results, memory(held), make);
        if (arrays.empty()) return false;
        Addresses ordered;
        function_.choose(arrays, ordered);
        if (function_(ordered.data(), at::get_num_threads()) != 0) return false;
        if (layer) count(*layer, ends(arrays));
        return true;
    }

  private:
    // The thread's own, which grows, or one for this call. Fresh memory costs a page fault for each
    // 4 KiB: a tenth of a long call.
    char* memory(at::Tensor& held) const {
        static thread_local at::Tensor kept;
        at::Tensor& used = workspace() <= KEPT ? kept : held;
        if (!used.defined() || used.numel() < workspace()) {
            used.reset();  // first, or there are two for a moment
            used = at::detail::empty_cpu({(workspace() / PIECE + 1) * PIECE}, at::kByte);
        }
        return static_cast<char*>(used.mutable_data_ptr());
    }

    FunctionOf<i64, int> function_;
};

// The kernels of a choice, in order.
class OnCuda final : public LaunchPlan {
  public:
    explicit OnCuda(Numbers& reader)
        : LaunchPlan(reader),
          launch_(reader.address<Launch>()),
          encode_(reader.address<Encode>()),
          stream_(reader.address<Stream>()),
          capturing_(reader.address<Capturing>()),
          words_(reader.address<const Words>()) {
        for (i64 n = reader.next(); n > 0; --n) {
            Part part{reader.list(), reader.list(), {}};
            for (i64 kernels = reader.next(); kernels > 0; --kernels) {
                void* const function = reader.address<void>();
                const Config config = *reader.address<const Config>();
                part.kernels.push_back({function,
                                        config,
                                        {config.attributes, config.attributes + config.count},
                                        {},
                                        {}});
                Kernel& kernel = part.kernels.back();
                for (const i64 n : reader.list()) kernel.parameters.push_back(static_cast<int>(n));
                for (i64 boxes = reader.next(); boxes > 0; --boxes)
                    kernel.boxes.emplace_back(reader);
            }
            parts_.push_back(std::move(part));
        }
        read_last(reader);
    }

    bool run(const Key& key, const Layer* layer, Results& results) const override {
        for (const at::Tensor* t : key.tensors)
            if (reinterpret_cast<std::uintptr_t>(t->const_data_ptr()) % VECTOR != 0) return false;
        const c10::Device device = key.tensors[0]->device();
        const c10::DeviceGuard guard(device);
        const auto options = at::TensorOptions().device(device);
        void* stream = nullptr;
        if (stream_(device.index(), &stream) != 0) return false;
        const volatile u64* const fault = word_of(stream);
        if (!fault) return false;
        const at::Tensor held =
            workspace() ? at::empty({workspace()}, options.dtype(at::kByte)) : at::Tensor();
        char* const memory = workspace() ? static_cast<char*>(held.mutable_data_ptr()) : nullptr;
        const auto make = [&](const Result& r) {
            return at::empty(r.sizes, options.dtype(r.dtype));
        };
        const Addresses arrays = addresses(key, results, memory, make);
        if (arrays.empty()) return false;
        for (const Part& part : parts_)
            if (!run(part, arrays, stream, fault)) return false;
        return !layer || count_there(*layer, ends(arrays), stream);
    }

  private:
    struct Attribute {  // CUlaunchAttribute
        int id;
        alignas(8) char value[64];
    };
    struct Config {  // CUlaunchConfig
        unsigned grid[3], block[3], shared;
        void* stream;
        const Attribute* attributes;
        unsigned count;
    };
    struct alignas(64) Map {  // CUtensorMap
        u64 words[16];
    };
    // cuTensorMapEncodeTiled
    using Encode = int(Map*, int type, unsigned rank, void* address, const u64* sizes,
                       const u64* strides, const unsigned* box, const unsigned* steps,
                       int interleave, int swizzle, int promotion, int fill);
    struct Boxes {  // the array that is copied in boxes; map_numbers of runtime/cuda.py
        i64 array;
        std::vector<i64> type, how, sizes, strides, box;

        explicit Boxes(Numbers& reader)
            : array(reader.next()),
              type(reader.list()),
              how(reader.list()),
              sizes(reader.list()),
              strides(reader.list()),
              box(reader.list()) {}
    };
    struct Kernel {
        void* function;
        Config config;
        std::vector<Attribute> attributes;
        std::vector<int> parameters;  // its second parameter, if it has one
        std::vector<Boxes> boxes;     // of its last parameters
    };
    struct Part {  // whose kernels have the same first parameter
        std::vector<i64> sizes, arrays;
        std::vector<Kernel> kernels;
    };
    using Launch = int(const Config*, void* function, void** parameters, void** extra);
    using Stream = std::int32_t(std::int32_t device, void** stream);
    using Capturing = int(void* stream, int* status);
    struct Words {  // as runtime/faults.py makes it
        const volatile u64* of_graphs;
        u64 count;
        struct {
            void* stream;
            const volatile u64* word;
        } of[];
    };

    // Where kernels on a stream report; null for a stream that Python has not seen yet, and if it
    // has to raise what was reported.
    const volatile u64* word_of(void* stream) const {
        int captured = 0;  // the default stream never is
        if (stream && capturing_(stream, &captured) != 0) return nullptr;
        if (captured) return words_->of_graphs;
        if (*words_->of_graphs != 0) return nullptr;
        for (u64 i = 0; i < words_->count; ++i)
            if (words_->of[i].stream == stream)
                return *words_->of[i].word == 0 ? words_->of[i].word : nullptr;
        return nullptr;
    }

    // Whether the map could be made. That of a tensor without elements is zeros.
    bool encode(Map& map, const Boxes& of, void* address) const {
        if (std::find(of.sizes.begin(), of.sizes.end(), 0) != of.sizes.end()) return true;
        const auto number = [](i64 n) { return static_cast<int>(n); };
        const std::vector<u64> sizes(of.sizes.begin(), of.sizes.end()),
            strides(of.strides.begin(), of.strides.end());
        const std::vector<unsigned> box(of.box.begin(), of.box.end()), steps(box.size(), 1);
        return encode_(&map, number(of.type[0]), static_cast<unsigned>(sizes.size()), address,
                       sizes.data(), strides.data(), box.data(), steps.data(), number(of.how[0]),
                       number(of.how[1]), number(of.how[2]), number(of.how[3])) == 0;
    }

    bool run(const Part& part, const Addresses& arrays, void* stream,
             const volatile u64* fault) const {
        c10::SmallVector<i64, 48> struct_(part.sizes.begin(), part.sizes.end());
        for (const i64 i : part.arrays)
            struct_.push_back(reinterpret_cast<i64>(arrays[static_cast<std::size_t>(i)]));
        struct_.push_back(reinterpret_cast<i64>(fault));
        for (const Kernel& kernel : part.kernels) {
            c10::SmallVector<void*, 4> parameters{struct_.data()};
            if (!kernel.parameters.empty())
                parameters.push_back(const_cast<int*>(kernel.parameters.data()));
            std::array<Map, MOST_MAPS> maps{};
            for (std::size_t i = 0; i < kernel.boxes.size(); ++i) {
                const Boxes& boxes = kernel.boxes[i];
                if (!encode(maps[i], boxes, arrays[static_cast<std::size_t>(boxes.array)]))
                    return false;
                parameters.push_back(&maps[i]);
            }
            Config config = kernel.config;
            config.stream = stream;
            config.attributes = kernel.attributes.data();
            if (launch_(&config, kernel.function, parameters.data(), nullptr) != 0) return false;
        }
        return true;
    }

    // As `count`, on the GPU.
    bool count_there(const Layer& layer, const std::int32_t* ends, void* stream) const {
        const std::int32_t* of_call = ends;
        Layer of_layer = layer;
        void* parameters[] = {&of_call, &of_layer};
        const Config config{{1, 1, 1}, {COUNTERS, 1, 1}, 0, stream, nullptr, 0};
        return launch_(&config, recorded.load()->kernel, parameters, nullptr) == 0;
    }

    Launch* launch_;
    Encode* encode_;
    Stream* stream_;
    Capturing* capturing_;
    const Words* words_;
    std::vector<Part> parts_;
};

// What is known
// -------------------------------------------------------------------------------------------------

class Known {
  public:
    std::shared_ptr<const LaunchPlan> find(const std::vector<u64>& words) {
        const std::shared_lock lock(mutex_);
        const auto at = plans_.find(words);
        return at == plans_.end() ? nullptr : at->second;
    }

    // Starts anew when it is full.
    void put(std::vector<u64> words, std::shared_ptr<const LaunchPlan> plan) {
        const std::unique_lock lock(mutex_);
        if (plans_.size() >= MOST) plans_.clear();
        plans_.emplace(std::move(words), std::move(plan));
    }

    std::size_t size() {
        const std::shared_lock lock(mutex_);
        return plans_.size();
    }

  private:
    struct Hash {
        std::size_t operator()(const std::vector<u64>& words) const {
            u64 h = 0x9E3779B97F4A7C15;
            for (const u64 w : words) {
                h = (h ^ w) * 0xD6E8FEB86659FD93;
                h ^= h >> 32;
            }
            return h;
        }
    };
    std::shared_mutex mutex_;
    std::unordered_map<std::vector<u64>, std::shared_ptr<const LaunchPlan>, Hash> plans_;
};

Known& known() {
    static Known* const all = new Known;  // calls may come while the process ends
    return *all;
}

// A call that Python runs, in whose place a plan may be offered; none for calls that no
// plan is wanted of.
thread_local std::shared_ptr<LaunchPlan>* offered = nullptr;

// Runs Python with a place for its plan, or without.
class Offering {
  public:
    explicit Offering(std::shared_ptr<LaunchPlan>* place)
        : before_(std::exchange(offered, place)) {}
    ~Offering() { offered = before_; }

  private:
    std::shared_ptr<LaunchPlan>* before_;
};

struct Context {  // of Python, that decides how calls run: context variables, and what they hold in
                  // calls that may run here
    _object *options, *usual, *noted, *none;
} context;

bool holds(_object* var, _object* wanted) {
    _object* value = nullptr;
    if (PyContextVar_Get(var, wanted, &value) != 0 || value == nullptr) return false;
    Py_DecRef(value);
    return value == wanted;
}

// Whether Python has nothing to say about how calls run now.
bool usual() {
    if (at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()) return false;
    const int state = PyGILState_Ensure();
    const bool usual = holds(context.options, context.usual) && holds(context.noted, context.none);
    PyGILState_Release(state);
    return usual;
}

// Kernels
// -------------------------------------------------------------------------------------------------

class Kernel : public c10::OperatorKernel {
  public:
    explicit Kernel(OperatorHandle fallback) : fallback_(std::move(fallback)) {}

  protected:
    void python(DispatchKeySet keys, Stack* stack, std::shared_ptr<LaunchPlan>* place) const {
        const Offering offering(place);
        fallback_.redispatchBoxed(keys, stack);
    }

  private:
    OperatorHandle fallback_;
};

// Below autograd.
class OfBackend final : public Kernel {
  public:
    using Kernel::Kernel;

    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
        const std::size_t count = op.schema().arguments().size();
        Key key;
        key.words.reserve(96);
        key.words.push_back(reinterpret_cast<u64>(this));
        const auto arguments = torch::jit::last(*stack, count);
        const bool comparable = std::all_of(arguments.begin(), arguments.end(),
                                            [&](const IValue& v) { return key.add(v); });
        if (!comparable || !usual()) return python(keys, stack, nullptr);
        const auto plan = known().find(key.words);
        Results results;
        const Layer* layer = nullptr;
        if (plan && key.in_memory() && plan->find(key, layer) && plan->run(key, layer, results)) {
            torch::jit::drop(*stack, count);
            return push(op, stack, std::move(results));
        }
        std::shared_ptr<LaunchPlan> place;
        python(keys, stack, plan ? nullptr : &place);
        if (place && place->fits(key.tensors.size(), returned(op, *stack)))
            known().put(std::move(key.words), std::move(place));
    }

  private:
    static bool is_list(const OperatorHandle& op) {
        return op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType;
    }

    static void push(const OperatorHandle& op, Stack* stack, Results results) {
        if (is_list(op))
            return void(stack->emplace_back(c10::List<at::Tensor>(std::move(results))));
        for (at::Tensor& t : results) stack->emplace_back(std::move(t));
    }

    static Results returned(const OperatorHandle& op, Stack& stack) {
        if (is_list(op)) return stack.back().toTensorVector();
        Results results;
        for (const IValue& v : torch::jit::last(stack, op.schema().returns().size()))
            results.push_back(v.toTensor());
        return results;
    }
};

// Autograd's: Python, where a gradient is wanted, or a tangent given.
class OfAutograd final : public Kernel {
  public:
    using Kernel::Kernel;

    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
        const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
        const bool reverse = c10::GradMode::is_enabled();
        const bool forward = torch::autograd::ForwardADLevel::try_get_by_idx(0) !=
                             nullptr;  // asking each tensor takes far longer
        const auto is_tracked = [=](const IValue& v) { return tracked(v, reverse, forward); };
        if ((reverse || forward) && std::any_of(arguments.begin(), arguments.end(), is_tracked))
            return python(keys, stack, nullptr);
        const at::AutoDispatchBelowAutograd guard;
        op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }

  private:
    static bool tracked(const IValue& v, bool reverse, bool forward) {
        if (v.isTensor())
            return (reverse && v.toTensor().requires_grad()) ||
                   (forward && v.toTensor()._fw_grad(0).defined());
        if (!v.isTensorList()) return false;
        const auto elements = v.toListRef();
        return std::any_of(elements.begin(), elements.end(),
                           [=](const IValue& e) { return tracked(e, reverse, forward); });
    }
};

template <class K>
void implement(const OperatorHandle& op, const OperatorHandle& fallback,
               std::initializer_list<c10::DispatchKey> keys) {
    static std::vector<c10::RegistrationHandleRAII>* const held =
        new std::vector<c10::RegistrationHandleRAII>;  // as long as the process
    for (const c10::DispatchKey key : keys) {
        auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<K>(fallback));
        held->push_back(c10::Dispatcher::singleton().registerImpl(
            op.operator_name(), key, std::move(kernel), std::nullopt, nullptr, "fusion_moe"));
    }
}

}  // namespace

// What ctypes calls
// -------------------------------------------------------------------------------------------------

extern "C" {

// options, noted: context variables; usual: the options that calls run here under.
void fusion_moe_begin(_object* options, _object* usual, _object* noted, _object* none) {
    context = {options, usual, noted, none};
}

// Implements an operation whose fallback is an operation of the same schema, implemented in Python.
void fusion_moe_implement(const char* name, const char* fallback) {
    auto& dispatcher = c10::Dispatcher::singleton();
    const OperatorHandle op = dispatcher.findSchemaOrThrow(name, ""),
                         other = dispatcher.findSchemaOrThrow(fallback, "");
    implement<OfBackend>(op, other, {c10::DispatchKey::CPU, c10::DispatchKey::CUDA});
    implement<OfAutograd>(op, other,
                          {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA});
}

// Whether a plan of the call that Python runs now is wanted.
int fusion_moe_wanted() { return offered != nullptr; }

// The plan of that call.
void fusion_moe_offer(const i64* numbers, i64 count) {
    Numbers reader(numbers, count);
    if (reader.next())
        *offered = std::make_shared<OnCuda>(reader);
    else
        *offered = std::make_shared<OnCpu>(reader);
}

// Has the calls of these layers counted, or of none. They must live as long as the process.
void fusion_moe_record(const void* layers) {
    recorded.store(static_cast<const Layers*>(layers), std::memory_order_release);
}

// Has a tensor at `handle` stand for a table of this owner's; at 0: for nothing any more.
void fusion_moe_share(i64 handle, i64 table, i64 count, i64 owner) {
    shared().put(reinterpret_cast<const void*>(handle),
                 {reinterpret_cast<char*>(table), count, owner});
}

// How many keys are known.
i64 fusion_moe_known() { return static_cast<i64>(known().size()); }

}  // extern "C"
