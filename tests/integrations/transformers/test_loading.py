"""Directories that other packages wrote: loaded, compared with the model that their bytes mean,
saved, loaded again.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from bad_calls import message, messages
from cover import few
from files import again, change, copied

pytest.importorskip("transformers")

from decoded import configured, logits, plain_model, relative, same_bytes, same_parameters
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeForCausalLM,
)
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

import fusion_moe
from fusion_moe.checkpoints import Directory, check_scales, convert, stored_weights
from fusion_moe.checkpoints.headers import read_header
from fusion_moe.errors import CheckpointError, OptionError, UnsupportedError
from fusion_moe.integrations.transformers.registration import register
from fusion_moe.nn import QuantizedLinear
from fusion_moe.nn.frozen.packed import PackedModule
from fusion_moe.transformers import NVFP4Config, from_pretrained

MADE = Path(__file__).parents[2] / "checkpoints" / "made"
DIRECTORIES = sorted(
    d.name for d in MADE.iterdir() if (d / "config.json").exists() and not d.name.startswith("bf16")
)
AS_MODELOPT = [name for name in DIRECTORIES if name in ("ct-qwen3_moe", "ct-mixtral", "ct-gpt_oss")]
AS_LOADED = [n for n in DIRECTORIES if n not in AS_MODELOPT and not n.startswith("bnb")]
PARTS = ("weight", "weight_scale", "weight_scale_2")


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", few(DIRECTORIES, 9))
def test_logits_are_those_of_the_decoded_weights(name):
    model = from_pretrained(MADE / name, dtype=torch.float32)
    assert relative(logits(model), logits(plain_model(MADE / name))) <= 1e-5
    encoded = [m for m in model.modules() if isinstance(m, PackedModule)]
    assert encoded
    assert not any(p.requires_grad for m in encoded for p in m.parameters(recurse=False))


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "ct-gpt_oss", "mxfp4-gpt_oss"])
def test_half_and_float(name):
    """As `to`: floats are cast, and no encoded byte changes."""
    model = from_pretrained(MADE / name, dtype=torch.float32)
    want, parts = logits(model), encoded_parts(model)
    for cast, near in ((model.half, 5e-3), (model.float, 5e-3), (model.bfloat16, 4e-2)):
        assert cast() is model
        assert relative(logits(model).float(), want) <= near
        assert all(map(same_bytes, encoded_parts(model), parts))
    other = Qwen3MoeForCausalLM(AutoConfig.from_pretrained(MADE / "bf16-qwen3_moe"))
    assert other.half().dtype == torch.float16
    other.is_quantized = True  # by others
    with pytest.raises(ValueError, match="not supported for quantized model"):
        other.half()


def encoded_parts(model) -> list[torch.Tensor]:
    return [
        p.detach().clone()
        for m in model.modules()
        if isinstance(m, PackedModule)
        for name, p in m.named_parameters(recurse=False)
        if name in m._parts_by_name()
    ]


@pytest.mark.parametrize("name", AS_LOADED)
def test_what_is_saved_has_the_same_bytes(name, tmp_path):
    model = from_pretrained(MADE / name)
    pickled = pickle.loads(pickle.dumps(model))  # as a process that is spawned gets it
    pickled.save_pretrained(tmp_path, max_shard_size="20KB")
    was, now = tensors(MADE / name), tensors(tmp_path)
    eight_bit = {
        key.removesuffix(".weight")
        for key, t in was.items()
        if t.dtype == torch.float8_e4m3fn and key.endswith(".weight")
    }
    assert was.keys() - now.keys() == {
        key for key in was if key.rpartition(".")[0] in eight_bit and key.endswith("_scale")
    }
    assert now.keys() <= was.keys()
    for key in now:
        # parts of routers, and what is in another dtype than the model
        cast = now[key].is_floating_point() and now[key].equal(was[key].to(now[key].dtype))
        assert key.rpartition(".")[0] in eight_bit or cast or same_bytes(was[key], now[key]), key
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same_parameters(from_pretrained(tmp_path), model)


@pytest.mark.parametrize("name", few(AS_MODELOPT, 2))
def test_nvfp4_of_others_is_saved_as_modelopt_does(name, tmp_path):
    model = from_pretrained(MADE / name, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.quant_algo == "W4A16_NVFP4"
    assert same_parameters(again, model)
    assert relative(logits(plain_model(tmp_path)), logits(plain_model(MADE / name))) <= 1e-7


def test_plain_from_pretrained_reads_modelopt():
    model, info = AutoModelForCausalLM.from_pretrained(
        MADE / "modelopt-mixtral", output_loading_info=True
    )
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantizedLinear)
    assert not any(info.values())
    assert same_parameters(model, from_pretrained(MADE / "modelopt-mixtral"))


def test_a_prepared_model_is_saved_as_it_was_loaded(tmp_path):
    model = from_pretrained(MADE / "modelopt-qwen3_moe")
    fusion_moe.prepare_(model, "cuda")
    assert any(
        m.weight_layout != "linear" for m in model.modules() if isinstance(m, QuantizedLinear)
    )
    model.save_pretrained(tmp_path)
    was, now = tensors(MADE / "modelopt-qwen3_moe"), tensors(tmp_path)
    assert was.keys() == now.keys()
    assert all(same_bytes(was[key], now[key]) for key in was)


@pytest.mark.parametrize(
    "name",
    ["modelopt-qwen3_moe", "modelopt-qwen3_5_moe-mixed", "ct-qwen3_moe-int4", "mxfp4-gpt_oss"],
)
def test_base_models(name, tmp_path):
    """The base model of a directory with a head; and the model with a head, of a directory whose
    names lack the base model's prefix.
    """
    full, base = from_pretrained(MADE / name), from_pretrained(MADE / name, auto_class=AutoModel)
    assert same_parameters(base, full.base_model)
    base.save_pretrained(tmp_path)
    assert same_parameters(from_pretrained(tmp_path), base)  # the class that config.json names
    with pytest.raises(CheckpointError, match="nothing for lm_head.weight"):
        from_pretrained(tmp_path, auto_class=AutoModelForCausalLM)
    head = {"lm_head.weight": full.lm_head.weight.detach().clone()}
    save_file(
        load_file(tmp_path / "model.safetensors") | head,
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert same_parameters(from_pretrained(tmp_path, auto_class=AutoModelForCausalLM), full)


def test_a_base_model_has_no_place_for_an_encoded_head(tmp_path):
    base = AutoModel.from_pretrained(changed(tmp_path, encoded_head))
    assert same_parameters(base, from_pretrained(MADE / "modelopt-qwen3_moe").base_model)


@pytest.mark.parametrize("names", ["model.layers.1.mlp", "mtp.layers.0.mlp"])
def test_layers_for_further_tokens_are_left_out(names, tmp_path):
    """Encoded ones too, as transformers leaves them out: those from num_hidden_layers on, and
    `mtp`.
    """
    copy = changed(tmp_path, again("model.layers.0.mlp", names))
    model = AutoModelForCausalLM.from_pretrained(copy)
    assert same_parameters(model, from_pretrained(MADE / "modelopt-qwen3_moe"))


def encoded_head(t):
    t.pop("lm_head.weight")
    t.update(
        {f"lm_head.{part}": t[f"model.layers.0.self_attn.q_proj.{part}"].clone() for part in PARTS}
    )


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "bf16-qwen3_moe"])
def test_a_new_head(name, tmp_path):
    """A classifier of a model that was saved with another head, which may be encoded: transformers
    makes the new one, and says so.
    """
    directory = changed(tmp_path, encoded_head) if name.startswith("modelopt") else MADE / name
    kind = {
        "auto_class": AutoModelForSequenceClassification,
        "num_labels": 3,
        "dtype": torch.float32,
    }
    model = from_pretrained(directory, **kind)
    assert model.score.weight.shape == (3, model.config.hidden_size)
    assert model.score.weight.isfinite().all()
    assert same_parameters(
        model.model, from_pretrained(directory, auto_class=AutoModel, dtype=torch.float32)
    )
    _, info = from_pretrained(directory, output_loading_info=True, **kind)
    assert info["missing_keys"] == {"score.weight"}
    model.save_pretrained(tmp_path / "saved")
    # a classifier, by config.json
    assert same_parameters(from_pretrained(tmp_path / "saved", dtype=torch.float32), model)


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "bf16-qwen3_moe"])
def test_a_head_that_was_lost(name, tmp_path):
    kind = {"auto_class": AutoModelForSequenceClassification, "num_labels": 3}
    from_pretrained(MADE / name, **kind).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="nothing for score.weight"):
        from_pretrained(tmp_path, **kind)


@pytest.mark.parametrize("named", [[1.5], "Qwen3MoeForCausalLM", [["Qwen3MoeForCausalLM"]]])
def test_architectures_are_names(named, tmp_path):
    directory = configured(changed(tmp_path), lambda c: c.update(architectures=named))
    with pytest.raises(
        CheckpointError,
        match=r"config.json: architectures .*; expected a list of "
        r"names of classes",
    ):
        from_pretrained(directory)


@pytest.mark.parametrize("named", [None, [], ["NoSuchModel"], ["pipeline"], ["BertModel"]])
def test_architectures_that_name_no_class_for_this_configuration(named, tmp_path):
    directory = configured(changed(tmp_path), lambda c: c.update(architectures=named))
    assert same_parameters(from_pretrained(directory), from_pretrained(MADE / "modelopt-qwen3_moe"))


def test_shapes_of_packed_tensors_are_not_unexpected():
    _, info = from_pretrained(MADE / "ct-qwen3_moe-int4", output_loading_info=True)
    assert not any(info.values())


EXPERTS, ATTENTION = "model.layers.0.mlp.experts", "model.layers.0.self_attn"
MIXED, OUT = "modelopt-qwen3_5_moe-mixed", "layers.0.linear_attn.out_proj.weight_scale"


def lost(name: str):
    return lambda t: [t.pop(f"{name}.{part}") for part in PARTS]


# Errors, before anything is read ------------------------------------------------------------------


def changed(tmp_path: Path, how=lambda t: None, name: str = "modelopt-qwen3_moe") -> Path:
    """A copy of a directory whose tensors a function has changed."""
    return change(copied(name, tmp_path), how)


def test_a_gap_is_an_error_and_no_random_number(tmp_path, golden):
    changes = {
        "a weight of an expert": lost(f"{EXPERTS}.2.up_proj"),
        "a weight of attention": lost(f"{ATTENTION}.q_proj"),
        "one too many": again("self_attn.q_proj.", "mlp.router."),
        "an expert too many": again("experts.0.", "experts.8."),
        "a norm": lambda t: t.pop("model.norm.weight"),
        "a scale": lambda t: t.pop(f"{ATTENTION}.q_proj.weight_scale_2"),
    }
    load = AutoModelForCausalLM.from_pretrained
    golden(
        messages({what: partial(load, changed(tmp_path / what, c)) for what, c in changes.items()})
    )


@pytest.mark.parametrize("below", ["mlp.experts.", "self_attn.q_proj.", "input_layernorm."])
def test_two_tensors_for_one_parameter(below, tmp_path):
    """transformers adds the prefix where it is missing."""
    name = f"layers.0.{below}"
    path = change(copied("modelopt-qwen3_moe", tmp_path), again(f"model.{name}", name))
    with pytest.raises(
        CheckpointError, match=rf"{name}[\w.]+ and model.{name}[\w.]+; expected one of the two"
    ):
        from_pretrained(path)


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("modelopt-qwen3_moe", "model.layers.0.mlp.experts.1.up_proj.bias"),
        ("modelopt-qwen3_moe", "model.layers.0.self_attn.q_proj.bias"),
        ("modelopt-qwen3_moe", "model.layers.0.mlp.experts.1.up_proj.lora_A.weight"),
        ("ct-qwen3_moe", "model.layers.0.mlp.experts.1.up_proj.weight"),
        ("modelopt-nemotron_h", "backbone.layers.0.mixer.experts.1.up_proj.bias"),
    ],
)
def test_numbers_beside_weights_that_no_module_has(directory, name, tmp_path):
    """A model without them computes something else."""
    one = {name: torch.ones(64)}
    path = change(copied(directory, tmp_path), lambda tensors: tensors.update(one))
    beneath = name.partition("layers.")[2]  # transformers renames the first module
    with pytest.raises(CheckpointError, match=f"layers.{beneath}, which no module has"):
        from_pretrained(path)


@pytest.mark.parametrize(
    ("directory", "tensor", "size"),
    [("ct-gpt_oss", "up_proj.bias", 64), ("modelopt-qwen3_moe", "up_proj.input_scale", 1)],
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_lies_beside_weights_has_its_size(directory, tensor, size, count, tmp_path):
    """One number would be every row's."""
    name = f"model.layers.0.mlp.experts.1.{tensor}"

    def cut(tensors):
        found = tensors.pop(name).reshape(-1)
        if count:
            tensors[name] = found.repeat(3)[:count]

    path = change(copied(directory, tmp_path), cut)
    if "scale" in name and count < 2:
        from_pretrained(path)  # such scales are kept if there are all
        return
    with pytest.raises(CheckpointError, match=re.escape(name) + rf".*expected \[{size}\]"):
        from_pretrained(path)


FIRST, INDEX = "model-00001-of-00004.safetensors", "model.safetensors.index.json"


def said(**entries):
    """Changes entries of a configuration."""
    return lambda path: configured(path, lambda config: config.update(entries))


def tensors_of(how):
    return lambda path: change(path, how, FIRST)


def cut(path):
    (path / FIRST).write_bytes((path / FIRST).read_bytes()[:-10])


DOWN = "model.layers.0.mlp.experts.1.down_proj.weight"
BROKEN = {
    "no directory": lambda path: shutil.rmtree(path),
    "no configuration": lambda path: (path / "config.json").unlink(),
    "no weights": lambda path: [file.unlink() for file in path.glob("model*")],
    "no shard": lambda path: (path / FIRST).unlink(),
    "half a shard": cut,
    "a file that the index has not": lambda path: (
        configured(path, lambda config: None)
        and (path / INDEX).write_text((path / INDEX).read_text().replace("model.norm", "norm"))
    ),
    "an entry twice": lambda path: (path / "config.json").write_text(
        (path / "config.json").read_text().replace("{", '{"hidden_size": 32,', 1)
    ),
    "an embedding of another size": tensors_of(
        lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:, 1:]})
    ),
    "an expert of another size": tensors_of(lambda t: t.update({DOWN: t[DOWN][:, 1:]})),
    "an expert in bytes": tensors_of(lambda t: t.update({DOWN: t[DOWN].to(torch.uint8)})),
    "no expert": tensors_of(lambda t: t.pop(DOWN)),
    "a quantization without a name": said(quantization_config=["nvfp4"]),
    "a hidden size in words": said(hidden_size="64"),
    "a hidden size below zero": said(hidden_size=-64),
    "an activation that nobody knows": said(hidden_act="nope"),
    "a text model that is a list": said(text_config=[1]),
    "no family": lambda path: configured(path, lambda config: config.pop("model_type")),
    "a family that nobody knows": said(model_type="unheard_of"),
}


@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN)
def test_broken_directories(how, tmp_path, golden):
    """No error of transformers or of the system, and none after the weights were read."""
    path = Path(shutil.copytree(MADE / "bf16-qwen3_moe", tmp_path / "copy"))
    how(path)
    golden(message(lambda: from_pretrained(path)).replace(transformers.__version__, "VERSION"))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("modelopt-qwen3_moe", {}),
        ("modelopt-qwen3_moe", {"device_map": "cpu", "max_memory": {"cpu": 10**12}}),
        ("bf16-qwen3_moe", {}),
    ],
)
def test_headers_are_read_once(name, how, monkeypatch):
    read = []
    monkeypatch.setattr(
        "fusion_moe.checkpoints.directory.read_header", lambda f: read.append(f) or read_header(f)
    )
    from_pretrained(MADE / name, **how)
    assert sorted(read) == sorted((MADE / name).glob("*.safetensors"))
    from_pretrained(MADE / name, **how)  # another call reads what is there by then
    assert len(read) == 2 * len({*read})


def test_a_key_mapping(tmp_path):
    """Names that no class has, by the argument of transformers, and saved under them again."""
    path = copied("modelopt-qwen3_moe", tmp_path)
    names = {f"theirs.{name}": t for name, t in load_file(path / "model.safetensors").items()}
    save_file(names, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="a key_mapping"):
        from_pretrained(path)
    how = {"key_mapping": {r"^theirs\.": ""}}
    model = from_pretrained(path, **how)
    assert same_parameters(model, from_pretrained(MADE / "modelopt-qwen3_moe"))
    model.save_pretrained(tmp_path / "saved")
    assert names.keys() == tensors(tmp_path / "saved").keys()
    assert same_parameters(from_pretrained(tmp_path / "saved", **how), model)


@pytest.mark.parametrize("k", [-1, 0, 5])
@pytest.mark.parametrize(
    ("load", "name"),
    [
        (from_pretrained, "bf16-qwen3_moe"),
        (from_pretrained, "modelopt-qwen3_moe"),
        (AutoModelForCausalLM.from_pretrained, "modelopt-qwen3_moe"),
    ],
)
def test_more_experts_of_a_token_than_there_are(load, name, k):
    with pytest.raises(CheckpointError, match=rf"num_experts_per_tok = {k}; expected 1 to 4"):
        load(MADE / name, num_experts_per_tok=k)


def test_sizes_that_may_differ(tmp_path):
    path = Path(shutil.copytree(MADE / "bf16-qwen3_moe", tmp_path / "copy"))
    said(vocab_size=40)(path)
    with pytest.raises(CheckpointError, match=r"weight \[32, 64\].* and 1 more; expected \[40, 64"):
        from_pretrained(path)
    assert len(from_pretrained(path, ignore_mismatched_sizes=True).lm_head.weight) == 40


def test_scales_are_numbers(tmp_path, golden):
    up, one = f"{EXPERTS}.2.up_proj.weight_scale", f"{ATTENTION}.q_proj.weight_scale_2"
    of_rows = f"model.language_model.{OUT}"
    changes = {
        "NaN": lambda t: t[up].view(torch.uint8)[3, 1].fill_(0x7F),
        "a negative one": lambda t: t[one].neg_(),
        "infinity, integers": lambda t: t[up][3, 0].fill_(torch.inf),
        "NaN, FP8": lambda t: t[of_rows].fill_(torch.nan),
        "negative ones, FP8": lambda t: t[of_rows].neg_(),
    }
    names = {"integers": "ct-qwen3_moe-int4", "FP8": MIXED}
    golden(
        messages(
            {
                what: partial(
                    from_pretrained,
                    changed(
                        tmp_path / what,
                        c,
                        names.get(what.partition(", ")[2], "modelopt-qwen3_moe"),
                    ),
                )
                for what, c in changes.items()
            }
        )
    )


def test_scales_of_integers_may_be_negative(tmp_path):
    """AutoRound writes them, since -8 has no opposite."""
    copy = changed(
        tmp_path,
        lambda t: t["model.layers.0.mlp.experts.2.up_proj.weight_scale"][::2].neg_(),
        "ct-qwen3_moe-int4",
    )
    check_scales(
        directory := Directory.open(copy), stored_weights(directory.tensors, "compressed-tensors")
    )
    model = from_pretrained(copy, dtype=torch.float32)
    assert (model.model.layers[0].mlp.experts.gate_up_proj_scale < 0).any()
    assert relative(logits(model), logits(plain_model(copy))) <= 1e-5


def test_a_method_that_is_not_read(tmp_path):
    said = {"quant_method": "quanto", "bits": 4}
    copy = configured(changed(tmp_path), lambda c: c.update(quantization_config=said))
    with pytest.raises(UnsupportedError, match="quant_method 'quanto'"):
        from_pretrained(copy)


def test_a_configuration_in_a_file_of_its_own(tmp_path):
    copy = configured(changed(tmp_path), lambda c: c.pop("quantization_config"))
    assert same_parameters(from_pretrained(copy), from_pretrained(MADE / "modelopt-qwen3_moe"))


def said_in(config: dict, part: str, key: str, said: dict) -> None:
    """Moves what a configuration says about quantization."""
    (config.setdefault(part, {}) if part else config)[key] = said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ct-qwen3_moe", "ct-qwen3_moe-int4", "modelopt-qwen3_moe"])
@pytest.mark.parametrize(
    ("part", "key"), [("", "compression_config"), ("llm_config", "quantization_config")]
)
def test_a_configuration_at_another_place(part, key, name, tmp_path):
    copy = changed(tmp_path, name=name)
    (copy / "hf_quant_config.json").unlink(missing_ok=True)
    configured(copy, lambda c: said_in(c, part, key, c.pop("quantization_config")))
    assert same_parameters(from_pretrained(copy), from_pretrained(MADE / name))


def nvfp4(n, k):
    scale = (torch.rand(n, k // 16) + 0.5).to(torch.float8_e4m3fn)
    return {
        "packed": torch.randint(256, (n, k // 2), dtype=torch.uint8),
        "scale": scale,
        "global_scale": torch.tensor([64.0]),
    }


def int4(n, k):
    packed = torch.randint(2**31 - 1, (n, k // 8), dtype=torch.int32)
    return {
        "packed": packed,
        "scale": torch.rand(n, k // 32).bfloat16(),
        "shape": torch.tensor([n, k], dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("encoded", "form"), [(nvfp4, "nvfp4-pack-quantized"), (int4, "pack-quantized")]
)
def test_a_configuration_in_that_of_the_text_model(encoded, form, tmp_path):
    """Experts of compressed-tensors in a multimodal model, said for the whole model or for its text
    model.
    """
    torch.manual_seed(0)
    name = "modelopt-qwen3_5_moe-mixed"
    shapes = {
        w.name: w.shape
        for w in stored_weights(Directory.open(MADE / name).tensors, "modelopt").values()
    }

    def experts_alone(found):
        for weight, shape in shapes.items():
            for key in [key for key in found if key.startswith(f"{weight}.")]:
                del found[key]
            parts = (
                {f"_{key}": t for key, t in encoded(*shape).items()}
                if ".experts." in weight
                else {"": torch.randn(shape).bfloat16()}
            )
            found.update({f"{weight}.weight{part}": t for part, t in parts.items()})

    copy = changed(tmp_path, experts_alone, name)
    (copy / "hf_quant_config.json").unlink()
    text = json.loads((copy / "config.json").read_text())
    del text["quantization_config"], text["architectures"]
    models = []
    for part in ("", "text_config"):
        config = {"model_type": "qwen3_5_moe", "text_config": dict(text)}
        said_in(
            config,
            part,
            "quantization_config",
            {"quant_method": "compressed-tensors", "format": form},
        )
        (copy / "config.json").write_text(json.dumps(config))
        models.append(from_pretrained(copy))
    assert same_parameters(*models)
    assert any(isinstance(m, PackedModule) for m in models[1].modules())


def test_entries_of_the_configuration_as_arguments(tmp_path):
    arguments = {
        "use_cache": False,
        "num_experts_per_tok": 1,
        "dtype": torch.float32,
        "attn_implementation": "eager",
    }
    for name in ("modelopt-qwen3_moe", "ct-qwen3_moe", "bf16-qwen3_moe"):
        model = from_pretrained(MADE / name, **arguments)
        assert (model.config.use_cache, model.config.num_experts_per_tok, model.dtype) == (
            False,
            1,
            torch.float32,
        )
        assert model.config._attn_implementation == "eager"
    with pytest.raises(TypeError, match="no_entry"):
        from_pretrained(MADE / name, no_entry=1)


ON_CPU = dict.fromkeys(
    ("model.embed_tokens", "model.rotary_emb", "model.layers", "model.norm", "lm_head"), "cpu"
)


BESIDE = "self_attn", "input_layernorm", "post_attention_layernorm"
EXPERTS_ON_DISK = {key: "cpu" for key in ON_CPU if key != "model.layers"} | {
    **{f"model.layers.0.{module}": "cpu" for module in BESIDE},
    "model.layers.0.mlp": "disk",
}


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"device_map": EXPERTS_ON_DISK, "quantization_config": NVFP4Config()}, "disk"),
        ({"device_map": "auto", "max_memory": {"cpu": "6KB"}, "weights": "fp8"}, "disk"),
        ({"device_map": "meta"}, "meta"),
    ],
)
def test_where_encoded_weights_cannot_be(given, where, tmp_path):
    """Where they are rounded or requantized while the model loads, before any weight is read."""
    pytest.importorskip("accelerate")
    if weights := given.pop("weights", None):
        given["quantization_config"] = NVFP4Config(activation_format="fp8", weights=weights)
    name = "bf16-qwen3_moe" if "quantization_config" in given else "modelopt-qwen3_moe"
    match = rf"device_map: model.layers.0.* on {where}; expected encoded weights in memory.*; name"
    with pytest.raises(UnsupportedError, match=match):
        AutoModelForCausalLM.from_pretrained(MADE / name, offload_folder=tmp_path, **given)
    assert not list(tmp_path.iterdir())


ON_DISK = ["modelopt-qwen3_moe", "modelopt-qwen3_5_moe-mixed", "ct-qwen3_moe-int4"]
ON_DISK += ["mxfp4-gpt_oss", "modelopt-nemotron_h", "bnb-qwen3_moe-linear"]


@pytest.mark.parametrize("name", ON_DISK)
@torch.no_grad()
def test_encoded_weights_on_disk(name, tmp_path):
    """accelerate brings them for each call: the same bits. Saved they are what they were."""
    pytest.importorskip("accelerate")
    want = from_pretrained(MADE / name)
    places = {"device_map": "auto", "max_memory": {"cpu": "3KB"}, "offload_folder": tmp_path / "d"}
    model = from_pretrained(MADE / name, **places)
    encoded = [m for m in model.modules() if isinstance(m, PackedModule)]
    for _ in range(2):
        assert torch.equal(logits(model), logits(want))
        assert all(p.is_meta for m in encoded for p in m.parameters(recurse=False))
    fusion_moe.prepare_(model)
    assert torch.equal(logits(model), logits(want))
    if not name.startswith("bnb"):  # in an encoding that is only read
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(want))


def test_experts_alone_on_disk(tmp_path):
    pytest.importorskip("accelerate")
    directory = MADE / "modelopt-qwen3_moe"
    load = partial(AutoModelForCausalLM.from_pretrained, directory, device_map=EXPERTS_ON_DISK)
    model = load(offload_folder=tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("model.layers.0.mlp.experts-")
    want, before = logits(from_pretrained(directory)), file.stat().st_ino
    assert torch.equal(logits(model), want)
    os.link(file, tmp_path / "before")
    load(offload_folder=tmp_path)  # a new file takes its place whole; who reads the old one has it
    assert (tmp_path / "before").stat().st_ino == before != file.stat().st_ino
    assert len([*tmp_path.iterdir()]) == 2
    with pytest.raises(UnsupportedError, match="adapters for .*; expected encoded weights in mem"):
        fusion_moe.nn.add_lora_(model, 4)
    with pytest.raises(UnsupportedError, match="weights = 'fp8' for .*; expected encoded weights"):
        fusion_moe.prepare_(model, weights="fp8")
    with pytest.raises(OptionError, match="no offload_folder, for model.layers.0.mlp.experts on"):
        load()


def test_two_models_in_one_folder(tmp_path):
    """accelerate reads a file by its name in each call: each model has its own."""
    pytest.importorskip("accelerate")

    def double(tensors):
        for name in tensors:
            if "experts." in name and name.endswith(".weight_scale_2"):
                tensors[name] *= 2

    directories = copied("modelopt-qwen3_moe", tmp_path), MADE / "modelopt-qwen3_moe"
    change(directories[0], double)
    want = [logits(from_pretrained(directory)) for directory in directories]
    assert not torch.equal(*want)
    (tmp_path / "folder").mkdir()
    places = {"device_map": EXPERTS_ON_DISK, "offload_folder": tmp_path / "folder"}
    models = [from_pretrained(directory, **places) for directory in directories]
    assert all(torch.equal(logits(model), known) for model, known in zip(models, want, strict=True))


def test_other_weights_may_be_on_disk(tmp_path):
    pytest.importorskip("accelerate")
    device_map = ON_CPU | {"model.embed_tokens": "disk"}
    model = from_pretrained(MADE / "ct-qwen3_moe", device_map=device_map, offload_folder=tmp_path)
    assert model.model.embed_tokens.weight.is_meta
    assert relative(logits(model), logits(from_pretrained(MADE / "ct-qwen3_moe"))) <= 1e-2


def in_the_hubs_cache(cache: Path, revisions: dict[str, Path]) -> None:
    """Directories as revisions of org/model, as huggingface_hub keeps what it has downloaded."""
    repo = cache / "models--org--model"
    for revision, directory in revisions.items():
        commit = revision.encode().hex().ljust(40, "0")
        shutil.copytree(directory, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)


def test_names_and_revisions_of_the_hub(tmp_path):
    """The configuration is that of the revision too, and the file of older exports is found
    there.
    """
    older = configured(changed(tmp_path / "older"), lambda c: c.pop("quantization_config"))
    in_the_hubs_cache(tmp_path / "hub", {"main": MADE / "modelopt-mixtral", "older": older})
    where = {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    assert same_parameters(
        from_pretrained("org/model", **where), from_pretrained(MADE / "modelopt-mixtral")
    )
    assert same_parameters(
        from_pretrained("org/model", revision="older", **where),
        from_pretrained(MADE / "modelopt-qwen3_moe"),
    )


def test_a_configuration_that_is_given_stays_as_it_is():
    config = AutoConfig.from_pretrained(MADE / "modelopt-qwen3_moe")
    was = config.to_dict()
    from_pretrained(MADE / "modelopt-qwen3_moe", config=config)
    assert config.to_dict() == was


def test_a_name_that_is_taken(monkeypatch):
    class Theirs(HfQuantizer):
        pass

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "theirs", Theirs)
    with pytest.warns(
        UserWarning,
        match="transformers has a quantizer for 'theirs' already, .*Theirs, and goes on using it",
    ):
        register("theirs", QuantizationConfigMixin, HfQuantizer)
    assert AUTO_QUANTIZER_MAPPING["theirs"] is Theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register("modelopt", QuantizationConfigMixin, HfQuantizer)  # ours already


def test_an_expert_by_an_unusual_number(tmp_path):
    """It is not expert 1 again, by whichever comes last."""
    copy = changed(tmp_path, again("experts.1.", "experts.01."))
    says = r"experts.01.\w+: expert 01; expected a number in digits 0 to 9"
    for read in from_pretrained, lambda copy: convert(copy, tmp_path / "converted"):
        with pytest.raises(CheckpointError, match=says):
            read(copy)


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "ct-qwen3_moe", "bf16-qwen3_moe"])
def test_a_state_dict_without_a_directory(name):
    config = AutoConfig.from_pretrained(MADE / name)
    state = tensors(MADE / name)
    assert same_parameters(
        from_pretrained(None, config=config, state_dict=state), from_pretrained(MADE / name)
    )
    if not name.startswith("bf16"):
        del state["model.layers.0.self_attn.q_proj.weight_scale"]
        with pytest.raises(
            CheckpointError,
            match="state_dict: .* without model.layers.0.self_attn.q_proj.weight_scale",
        ):
            from_pretrained(None, config=config, state_dict=state)
    with pytest.raises(OptionError, match="no directory; expected config and state_dict instead"):
        from_pretrained(None, state_dict=state)


def test_transformers_own_call_has_no_files_in_a_state_dict():
    config = AutoConfig.from_pretrained(MADE / "modelopt-qwen3_moe")
    with pytest.raises(
        UnsupportedError, match="encoded weights in a state dict; .* takes config and state_dict"
    ):
        Qwen3MoeForCausalLM.from_pretrained(
            None, config=config, state_dict=tensors(MADE / "modelopt-qwen3_moe")
        )


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("load", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_a_variant_beside_others(load, size, tmp_path):
    model = from_pretrained(MADE / "modelopt-qwen3_moe")
    model.save_pretrained(tmp_path, variant="nvfp4", max_shard_size=size)
    shutil.copy(
        MADE / "bf16-qwen3_moe" / "model-00001-of-00004.safetensors", tmp_path / "model.safetensors"
    )
    assert same_parameters(load(tmp_path, variant="nvfp4"), model)


@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("given", [{"mesh": True}, {"experts_device": "cpu"}])
def test_which_files_a_share_is_read_from(given, size, tmp_path):
    """Not those of the directory around, or of no variant: they have the same names and shapes."""
    model = from_pretrained(shutil.copytree(MADE / "modelopt-qwen3_moe", tmp_path / "all"))
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "all" / "sub", max_shard_size=size)
    model.save_pretrained(tmp_path / "all", max_shard_size=size, variant="other")
    try:
        if "mesh" in given:
            distributed.init_process_group(
                "gloo", store=distributed.HashStore(), rank=0, world_size=1
            )
            given = {"mesh": init_device_mesh("cpu", (1,))}
        else:
            given |= {"device_map": "auto", "max_memory": {"pretended": "1GB", "cpu": "1GB"}}
        for files in ({"subfolder": "sub"}, {"variant": "other"}):
            loaded = from_pretrained(tmp_path / "all", **files, **given)
            assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def test_accelerates_hooks_stay_on_linear_layers(tmp_path):
    pytest.importorskip("accelerate")
    device_map = ON_CPU | {"model.embed_tokens": "disk", "model.layers.0.self_attn.q_proj": "cpu"}
    device_map |= {
        f"model.layers.0.{rest}": "cpu"
        for rest in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp")
    }
    model = from_pretrained(MADE / "ct-qwen3_moe", device_map=device_map, offload_folder=tmp_path)
    assert isinstance(q := model.model.layers[0].self_attn.q_proj, QuantizedLinear)
    assert hasattr(q, "_hf_hook")
    assert relative(logits(model), logits(from_pretrained(MADE / "ct-qwen3_moe"))) <= 1e-2


@pytest.mark.parametrize("kind", [[], {}, 5, None], ids=str)
def test_the_model_type_is_a_name(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(
        CheckpointError,
        match=r"model_type .*; expected the name of a family "
        r"of models",
    ):
        from_pretrained(tmp_path)


def test_kimi_k2_is_deepseek_v3(tmp_path):
    path = Path(shutil.copytree(MADE / "modelopt-deepseek_v3-w4a16", tmp_path / "kimi"))
    said = {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }
    model = from_pretrained(configured(path, lambda c: c.update(said)))
    assert same_parameters(model, from_pretrained(MADE / "modelopt-deepseek_v3-w4a16"))
    model.save_pretrained(tmp_path / "saved")
    assert same_parameters(from_pretrained(tmp_path / "saved"), model)


def test_a_parallel_plan_is_refused():
    config = AutoConfig.from_pretrained(MADE / "modelopt-mixtral")
    config.distributed_config = {"tp_size": 2}
    with pytest.raises(UnsupportedError, match="a parallel plan"):
        AutoModelForCausalLM.from_pretrained(MADE / "modelopt-mixtral", config=config)


def test_floats_under_names_of_no_parameter_are_refused(tmp_path):
    dense = convert(MADE / "ct-mixtral", tmp_path / "dense", to="dense")

    def rename(tensors):  # as compressed-tensors does, which the plain model has not
        for name in [name for name in tensors if ".experts." in name]:
            tensors[re.sub(r"\.w(\d)\.", r".proj_\1.", name)] = tensors.pop(name)

    change(dense, rename)
    with pytest.raises(CheckpointError, match="nothing for "):
        from_pretrained(tmp_path / "dense")
    model, info = from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert info["missing_keys"]
    assert isinstance(model, torch.nn.Module)


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "config.json", "generation_config.json"]
)
def test_json_that_never_ends(name, tmp_path):
    path = Path(shutil.copytree(MADE / "bf16-qwen3_moe", tmp_path / "copy"))
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name}: no plain file"):
        from_pretrained(path)
    (path / name).unlink()
    (path / name).write_text("[" * 10**6)
    with pytest.raises(CheckpointError, match=f"{name}: not JSON"):
        from_pretrained(path)


@pytest.mark.parametrize("kind", ["own", None])
def test_code_of_a_checkpoint_is_not_run(kind, tmp_path, monkeypatch):
    """Nor is anybody asked for it."""
    path = copied("modelopt-qwen3_moe", tmp_path)
    file = path / "config.json"
    config = json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "own.Config"}}
    del config["model_type"]
    file.write_text(json.dumps(config | ({"model_type": kind} if kind else {})))
    (path / "own.py").write_text("raise AssertionError")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for given in ({}, {"trust_remote_code": False}):
        with pytest.raises(UnsupportedError, match="trust_remote_code=True runs that code"):
            from_pretrained(path, **given)
