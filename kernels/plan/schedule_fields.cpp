// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/schedule_fields.hpp>

#include <cstddef>
#include <utility>

namespace faultline {
namespace {

struct Anything {
    template <class T>
    operator T() const;  // NOLINT: conversion is the purpose; never called
};

template <class T, std::size_t... i>
constexpr bool takes(std::index_sequence<i...>) {
    return requires { T{(static_cast<void>(i), Anything{})...}; };
}

/// How many members an aggregate has: as many initialisers as it takes.
template <class T, std::size_t count = 64>
constexpr std::size_t member_count() {
    if constexpr (takes<T>(std::make_index_sequence<count>{}))
        return count;
    else
        return member_count<T, count - 1>();
}

constexpr std::size_t visited_count() {
    Schedule schedule;
    std::size_t count = 0;
    for_each_field(schedule, [&](std::string_view, const auto&) { ++count; });
    return count;
}
static_assert(visited_count() == member_count<Schedule>(), "for_each_field visits every field of Schedule");

constexpr auto names = [] {
    std::array<std::string_view, visited_count()> all;
    Schedule schedule;
    std::size_t at = 0;
    for_each_field(schedule, [&](std::string_view name, const auto&) { all[at++] = name; });
    return all;
}();

}  // namespace

std::span<const std::string_view> schedule_field_names() { return names; }

}  // namespace faultline
