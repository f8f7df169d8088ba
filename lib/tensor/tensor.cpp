// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/tensor.hpp>

#include <limits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/format/format.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

template <class T>
T element(std::span<const std::byte> bytes, std::size_t i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
}

template <class T, class Source>
void convert(std::span<const std::byte> bytes, std::vector<T>& out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<T>(element<Source>(bytes, i));
}

/// Codes of a format of at most 16 bits; each is decoded once where there are more elements than codes.
template <class T, class Code>
void decode_all(std::span<const std::byte> bytes, std::vector<T>& out, Format format) {
    const std::size_t codes = std::size_t{1} << (8 * sizeof(Code));
    if (out.size() < codes) {
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<T>(decode(element<Code>(bytes, i), format));
        return;
    }
    std::vector<T> value(codes);
    for (std::size_t code = 0; code < codes; ++code) value[code] = static_cast<T>(decode(code, format));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = value[element<Code>(bytes, i)];
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
            decode_all<T, std::uint16_t>(bytes, out, fp16);
            break;
        case Dtype::e5m2:
            decode_all<T, std::uint8_t>(bytes, out, e5m2);
            break;
        case Dtype::e4m3:
            decode_all<T, std::uint8_t>(bytes, out, e4m3);
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
