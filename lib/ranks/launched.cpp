// SPDX-License-Identifier: Apache-2.0
#include <faultline/ranks/launched.hpp>

#include <cstdlib>
#include <string_view>
#include <utility>

#include <dlfcn.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/ranks/local.hpp>
#include <faultline/ranks/mpi_module.hpp>

namespace faultline {
namespace {

/// The number that the variable holds; -1 where there is none.
int number(const char* variable) {
    const char* text = std::getenv(variable);
    if (text == nullptr || *text == '\0') return -1;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    return *end == '\0' && value >= 0 && value < (1 << 24) ? static_cast<int>(value) : -1;
}

/// MPI stands in a module of its own, so that the program starts where there is no MPI library, and no command but a run of
/// several ranks pays for loading one.
std::unique_ptr<Ranks> join_mpi(const Launch& launch) {
    // Without either the library would end the process with a page of its own.
    if (launch.variable.starts_with("SLURM") && number("PMIX_RANK") < 0 && number("PMI_RANK") < 0)
        throw RequestError(fmt::format("{}: says {} ranks, and srun has not told MPI of them: expected srun --mpi=pmix",
                                       launch.variable, launch.size));
    void* module = ::dlopen(mpi::module_name, RTLD_NOW | RTLD_LOCAL);
    if (module == nullptr)
        throw RequestError(
            fmt::format("{}: says {} ranks, and there is no MPI here ({}): expected a build that found MPI, or "
                        "--ranks {} without a launcher",
                        launch.variable, launch.size, ::dlerror(), launch.size));
    const auto join = reinterpret_cast<mpi::Join*>(::dlsym(module, mpi::join_name));
    if (join == nullptr)
        throw WorkError(
            fmt::format("{}: has no function {}: expected the module of this build", mpi::module_name, mpi::join_name));
    std::unique_ptr<Ranks> ranks(join());
    if (ranks->size() != launch.size)
        throw RequestError(
            fmt::format("{}: says {} ranks, and {} knows of {}: expected a launcher of that MPI (with Slurm, "
                        "srun --mpi=pmix)",
                        launch.variable, launch.size, ranks->transport(), ranks->size()));
    return ranks;
}

}  // namespace

std::optional<Launch> launch_of_environment() {
    for (const auto& [size, rank] :
         {std::pair{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"}, std::pair{"PMI_SIZE", "PMI_RANK"},
          std::pair{"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}})
        if (number(size) > 1 && number(rank) >= 0) return Launch{size, number(size), number(rank)};
    return std::nullopt;
}

std::unique_ptr<Ranks> join_launched_ranks() {
    if (std::unique_ptr<Ranks> local = local_rank_of_environment()) return local;
    const std::optional<Launch> launch = launch_of_environment();
    return launch ? join_mpi(*launch) : nullptr;
}

}  // namespace faultline
