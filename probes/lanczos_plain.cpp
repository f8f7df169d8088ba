// SPDX-License-Identifier: Apache-2.0
// For any processor: the C library's fma, one element at a time. Right and slow; the sanitizer builds run it too.
#include "lanczos_passes.hpp"

namespace faultline::lanczos_detail {
namespace {

struct EightDoubles {
    struct Type {
        double x[8];
    };
    static Type zero() { return {}; }
    template <class T>
    static Type load(const T* x) {
        Type v;
        for (int i = 0; i < 8; ++i) v.x[i] = static_cast<double>(x[i]);
        return v;
    }
    static void store(double* x, const Type& v) {
        for (int i = 0; i < 8; ++i) x[i] = v.x[i];
    }
    static Type broadcast(double x) { return {{x, x, x, x, x, x, x, x}}; }
    static Type fma(const Type& a, const Type& b, const Type& c) {
        Type v;
        for (int i = 0; i < 8; ++i) v.x[i] = __builtin_fma(a.x[i], b.x[i], c.x[i]);
        return v;
    }
};

}  // namespace

const Passes passes_plain = PassesOf<EightDoubles, 4>::all;

}  // namespace faultline::lanczos_detail
