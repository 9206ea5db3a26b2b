// Policies that a constant chooses.
#pragma once

namespace {

// The type A, or B.
template <bool FIRST, class A, class B>
struct ChooseOf {
    using Type = A;
};
template <class A, class B>
struct ChooseOf<false, A, B> {
    using Type = B;
};
template <bool FIRST, class A, class B>
using Choose = typename ChooseOf<FIRST, A, B>::Type;

}  // namespace
