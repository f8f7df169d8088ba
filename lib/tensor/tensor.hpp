// SPDX-License-Identifier: Apache-2.0
// A named array as a file holds it, and a set of them: what a capture is made of.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/tensor/dtype.hpp>

namespace faultline {

static_assert(std::endian::native == std::endian::little,
              "tensor bytes are kept as the files have them: little-endian");

/// Row-major elements, little-endian. An empty shape is a scalar (one element); a dimension of 0 makes it empty.
struct Tensor {
    std::string name;
    Dtype dtype = Dtype::f64;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> bytes;  ///< size() * width(dtype)

    /// Number of elements.
    [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(bytes.size() / width(dtype)); }
    /// Elements as doubles, in order; exact for every float format and for integers up to 2^53, nearest-even beyond. A
    /// NaN stays a NaN (its payload is not kept); a bool is 0 or 1.
    [[nodiscard]] std::vector<double> to_double() const;
    /// The same as floats; exact for f32 and every narrower float, nearest-even for the rest.
    [[nodiscard]] std::vector<float> to_float() const;
};

/// "[1, 8, 512, 64]"; a scalar is "[]".
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);
/// Bytes of an array of that shape; nothing when a dimension is negative or the product passes 2^63 - 1.
[[nodiscard]] std::optional<std::uint64_t> byte_count(Dtype dtype, std::span<const std::int64_t> shape);

/// A tensor of these values. `dtype` may name any format of the same width: make_tensor<std::uint16_t>("q", {2}, bits,
/// Dtype::bf16). RequestError when shape and number of values disagree, or the widths.
template <class T>
[[nodiscard]] Tensor make_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const T> values,
                                 Dtype dtype = dtype_of<T>());

/// The tensors of one file or folder, by name.
struct TensorSet {
    std::string source;  ///< path as given, escaped for messages
    std::map<std::string, Tensor, std::less<>> tensors;
    std::map<std::string, std::string, std::less<>> metadata;

    /// The tensor, or nullptr.
    [[nodiscard]] const Tensor* find(std::string_view name) const;
    /// The tensor; RequestError `FILE: tensor "x" is missing: expected one of …`.
    [[nodiscard]] const Tensor& at(std::string_view name) const;
    /// Adds one; RequestError when the name is there already.
    void add(Tensor tensor);
};

namespace detail {
[[nodiscard]] Tensor make_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const std::byte> bytes,
                                 Dtype dtype, std::size_t value_width);
}  // namespace detail

template <class T>
Tensor make_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const T> values, Dtype dtype) {
    return detail::make_tensor(std::move(name), std::move(shape), std::as_bytes(values), dtype, sizeof(T));
}

}  // namespace faultline
