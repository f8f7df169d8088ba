// SPDX-License-Identifier: Apache-2.0
// Ranks over MPI. Bytes go with MPI_Send and MPI_Recv alone: what is summed, and in which order, is decided in sums.cpp. An
// error of MPI ends all ranks, as MPI_ERRORS_ARE_FATAL has it, for a message that is lost cannot be made up for.
#include <faultline/ranks/mpi_module.hpp>

#include <algorithm>

#include <mpi.h>

namespace faultline::mpi {
namespace {

constexpr std::size_t most_at_once = std::size_t{1} << 30;  // counts are int

template <class Bytes, class F>
void in_parts(Bytes bytes, F&& f) {
    while (!bytes.empty()) {
        const auto part = bytes.first(std::min(bytes.size(), most_at_once));
        f(part);
        bytes = bytes.subspan(part.size());
    }
}

class MpiRanks final : public Ranks {
  public:
    MpiRanks() : Ranks(0, 1) {
        // One thread calls MPI, and others compute meanwhile.
        int provided = 0;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &size_);
        MPI_Comm machine = MPI_COMM_NULL;
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine);
        MPI_Comm_rank(machine, &local_rank_);
        MPI_Comm_size(machine, &local_size_);
        MPI_Comm_free(&machine);
    }
    ~MpiRanks() override { MPI_Finalize(); }

    [[nodiscard]] std::string transport() const override {
        char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
        int length = 0;
        MPI_Get_library_version(text, &length);
        const std::string all(text, static_cast<std::size_t>(length));
        return all.substr(0, all.find(','));  // Open MPI goes on with its packager and date
    }
    void send(int to, std::span<const std::byte> bytes) override {
        in_parts(bytes, [&](std::span<const std::byte> part) {
            MPI_Send(part.data(), static_cast<int>(part.size()), MPI_BYTE, to, 0, MPI_COMM_WORLD);
        });
    }
    void receive(int from, std::span<std::byte> bytes) override {
        in_parts(bytes, [&](std::span<std::byte> part) {
            MPI_Recv(part.data(), static_cast<int>(part.size()), MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        });
    }
    void abandon() noexcept override { MPI_Abort(MPI_COMM_WORLD, 1); }
};

}  // namespace
}  // namespace faultline::mpi

extern "C" faultline::Ranks* faultline_join_mpi() { return new faultline::mpi::MpiRanks; }
