// SPDX-License-Identifier: Apache-2.0
// What the module with the MPI transport exports.
#pragma once

#include <faultline/ranks/ranks.hpp>

namespace faultline::mpi {

inline constexpr const char* module_name = "libfaultline_mpi.so";
inline constexpr const char* join_name = "faultline_join_mpi";
/// MPI_Init, and the ranks of MPI_COMM_WORLD, which the caller owns; their end is MPI_Finalize. Once in a process.
using Join = Ranks*();

}  // namespace faultline::mpi
