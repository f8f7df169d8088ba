// SPDX-License-Identifier: Apache-2.0
// What faults did in the part of a step that one of several ranks worked on, as bytes, and all parts put together.
#include <faultline/dissociation/fault_hooks.hpp>

#include <cstring>
#include <type_traits>

#include <faultline/base/error.hpp>

namespace faultline {
namespace {

template <class T>
void put(std::string& out, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T take(std::string_view& from) {
    if (from.size() < sizeof(T))
        throw WorkError("ranks: what another rank's faults did is cut short: expected all of it");
    T value;
    std::memcpy(&value, from.data(), sizeof value);
    from.remove_prefix(sizeof value);
    return value;
}

}  // namespace

std::string FaultHooks::part() const {
    std::string out;
    put(out, attention_.size());
    for (const auto& [place, found] : attention_) {
        const auto& [layer, head, micro_step, sequence, fault] = place;
        for (const int number : {layer, head, micro_step, sequence}) put(out, number);
        put(out, fault);
        put(out, found);
    }
    for (const auto& injector : model_) {
        put(out, injector->places().size());
        for (const auto& [place, found] : injector->places()) {
            const auto& [layer, micro_step, tile] = place;
            for (const int number : {layer, micro_step}) put(out, number);
            put(out, tile);
            put(out, found);
        }
    }
    return out;
}

/// A place is one rank's, or (updates) every rank's alike: whoever has it first.
void FaultHooks::join(std::span<const std::string> parts) {
    for (std::string_view from : parts) {
        for (auto count = take<std::size_t>(from); count > 0; --count) {
            const int layer = take<int>(from), head = take<int>(from), micro_step = take<int>(from),
                      sequence = take<int>(from);
            const auto fault = take<std::size_t>(from);
            attention_.try_emplace({layer, head, micro_step, sequence, fault}, take<Realised>(from));
        }
        for (const auto& injector : model_)
            for (auto count = take<std::size_t>(from); count > 0; --count) {
                const int layer = take<int>(from), micro_step = take<int>(from);
                const auto tile = take<std::uint64_t>(from);
                injector->add_place({layer, micro_step, tile}, take<Realised>(from));
            }
    }
}

}  // namespace faultline
