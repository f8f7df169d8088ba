// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/tensor.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

template <class T>
T element(std::span<const std::byte> bytes, std::size_t i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
}

/// The value of a float of `exponent_bits` and `mantissa_bits` with IEEE 754 subnormals and, if `specials`, IEEE
/// infinities and NaNs in the last binade; otherwise (OCP E4M3) only the all-ones pattern is a NaN.
double small_float(unsigned bits, int exponent_bits, int mantissa_bits, bool specials) {
    const unsigned mantissa_mask = (1u << mantissa_bits) - 1u;
    const unsigned exponent_mask = (1u << exponent_bits) - 1u;
    const unsigned mantissa = bits & mantissa_mask;
    const unsigned exponent = bits >> mantissa_bits & exponent_mask;
    const double sign = bits >> (mantissa_bits + exponent_bits) & 1u ? -1.0 : 1.0;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    if (exponent == exponent_mask) {
        if (specials && mantissa == 0) return sign * std::numeric_limits<double>::infinity();
        if (specials || mantissa == mantissa_mask) return std::numeric_limits<double>::quiet_NaN();
    }
    const double significand = exponent == 0 ? mantissa : mantissa + (1u << mantissa_bits);
    return sign * std::ldexp(significand, std::max(static_cast<int>(exponent), 1) - bias - mantissa_bits);
}

template <class T, class Source>
void convert(std::span<const std::byte> bytes, std::vector<T>& out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<T>(element<Source>(bytes, i));
}

/// Every encoding of a format of at most 16 bits, decoded once.
template <class T, class Bits>
void convert_by_table(std::span<const std::byte> bytes, std::vector<T>& out, int exponent_bits, int mantissa_bits,
                      bool specials) {
    const std::size_t encodings = std::size_t{1} << (8 * sizeof(Bits));
    if (out.size() < encodings) {
        for (std::size_t i = 0; i < out.size(); ++i) {
            out[i] = static_cast<T>(small_float(element<Bits>(bytes, i), exponent_bits, mantissa_bits, specials));
        }
        return;
    }
    std::vector<T> value(encodings);
    for (std::size_t i = 0; i < encodings; ++i) {
        value[i] = static_cast<T>(small_float(static_cast<unsigned>(i), exponent_bits, mantissa_bits, specials));
    }
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = value[element<Bits>(bytes, i)];
}

template <class T>
std::vector<T> to(const Tensor& tensor) {
    std::vector<T> out(static_cast<std::size_t>(tensor.size()));
    const std::span<const std::byte> bytes = tensor.bytes;
    switch (tensor.dtype) {
        case Dtype::f64:
            convert<T, double>(bytes, out);
            break;
        case Dtype::f32:
            convert<T, float>(bytes, out);
            break;
        case Dtype::bf16:  // the upper half of a float32
            for (std::size_t i = 0; i < out.size(); ++i) {
                const auto bits = static_cast<std::uint32_t>(element<std::uint16_t>(bytes, i)) << 16;
                out[i] = static_cast<T>(std::bit_cast<float>(bits));
            }
            break;
        case Dtype::f16:
            convert_by_table<T, std::uint16_t>(bytes, out, 5, 10, true);
            break;
        case Dtype::e5m2:
            convert_by_table<T, std::uint8_t>(bytes, out, 5, 2, true);
            break;
        case Dtype::e4m3:
            convert_by_table<T, std::uint8_t>(bytes, out, 4, 3, false);
            break;
        case Dtype::i64:
            convert<T, std::int64_t>(bytes, out);
            break;
        case Dtype::i32:
            convert<T, std::int32_t>(bytes, out);
            break;
        case Dtype::i16:
            convert<T, std::int16_t>(bytes, out);
            break;
        case Dtype::i8:
            convert<T, std::int8_t>(bytes, out);
            break;
        case Dtype::u8:
            convert<T, std::uint8_t>(bytes, out);
            break;
        case Dtype::u16:
            convert<T, std::uint16_t>(bytes, out);
            break;
        case Dtype::u32:
            convert<T, std::uint32_t>(bytes, out);
            break;
        case Dtype::u64:
            convert<T, std::uint64_t>(bytes, out);
            break;
        case Dtype::boolean:
            for (std::size_t i = 0; i < out.size(); ++i) out[i] = bytes[i] != std::byte{0} ? T{1} : T{0};
            break;
    }
    return out;
}

}  // namespace

std::vector<double> Tensor::to_double() const { return to<double>(*this); }
std::vector<float> Tensor::to_float() const { return to<float>(*this); }

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::optional<std::uint64_t> byte_count(Dtype dtype, std::span<const std::int64_t> shape) {
    constexpr std::uint64_t largest = std::numeric_limits<std::int64_t>::max();
    // A zero anywhere makes the product zero, but the product of the others must still be a number that code can form.
    std::uint64_t product = width(dtype);
    bool empty = false;
    for (const std::int64_t extent : shape) {
        if (extent < 0) return std::nullopt;
        if (extent == 0)
            empty = true;
        else if (product > largest / static_cast<std::uint64_t>(extent))
            return std::nullopt;
        else
            product *= static_cast<std::uint64_t>(extent);
    }
    return empty ? 0 : product;
}

Tensor detail::make_tensor(std::string name, std::vector<std::int64_t> shape, std::span<const std::byte> bytes,
                           Dtype dtype, std::size_t value_width) {
    if (width(dtype) != value_width) {
        throw RequestError(fmt::format("tensor {}: values of {} bytes: expected {} bytes for {}", in_quotes(name),
                                       value_width, width(dtype), print_name(dtype)));
    }
    if (byte_count(dtype, shape) != bytes.size()) {
        throw RequestError(fmt::format("tensor {}: {} values: expected as many as shape {} has", in_quotes(name),
                                       bytes.size() / value_width, shape_text(shape)));
    }
    return {std::move(name), dtype, std::move(shape), {bytes.begin(), bytes.end()}};
}

const Tensor* TensorSet::find(std::string_view name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : &found->second;
}

const Tensor& TensorSet::at(std::string_view name) const {
    if (const Tensor* tensor = find(name)) return *tensor;
    constexpr std::size_t listed = 12;  // a line's worth; inspect prints them all
    std::string names;
    std::size_t count = 0;
    for (const auto& [other, tensor] : tensors) {
        if (count++ == listed) break;
        if (!names.empty()) names += ", ";
        names += in_quotes(other);
    }
    if (tensors.size() > listed) names += fmt::format(" … ({} in all)", tensors.size());
    throw RequestError(fmt::format("{}: tensor {} is missing: expected {}", source, in_quotes(name),
                                   tensors.empty() ? "a file that holds tensors" : "one of " + names));
}

void TensorSet::add(Tensor tensor) {
    const auto [place, added] = tensors.try_emplace(tensor.name);
    if (!added) {
        throw RequestError(
            fmt::format("{}: tensor {} occurs twice: expected every name once", source, in_quotes(tensor.name)));
    }
    place->second = std::move(tensor);
}

}  // namespace faultline
