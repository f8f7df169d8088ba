// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/nccl.hpp>

#include <cstdlib>
#include <exception>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <fmt/format.h>

#include <faultline/gpt_device/cards.hpp>
#include <faultline/ranks/ending.hpp>
#include <faultline/ranks/errors.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt::on_device {
namespace {

// As nccl.h has them: ncclResult_t, ncclDataType_t and ncclRedOp_t are enumerations of the size of int.
using Result = int;
struct UniqueId {
    char bytes[128];  // NCCL_UNIQUE_ID_BYTES
};
using Comm = void*;
constexpr Result success = 0, in_progress = 7;
constexpr int float32 = 7, float64 = 8, bfloat16 = 9, sum = 0, max = 2;

struct Functions {
    Result (*version)(int*);
    const char* (*error_text)(Result);
    Result (*unique_id)(UniqueId*);
    Result (*init)(Comm*, int size, UniqueId, int rank);
    Result (*all_reduce)(const void*, void*, std::size_t, int type, int operation, Comm, Stream);
    Result (*async_error)(Comm, Result*);
    Result (*abort)(Comm);
    Result (*destroy)(Comm);
};

Functions load() {
    const char* const named = std::getenv("FAULTLINE_NCCL");
    const char* const name = named != nullptr && *named != '\0' ? named : "libnccl.so.2";
    // Multicast over NVLink needs rights that a container may not have, and a run would stop at the first sum.
    (void)::setenv("NCCL_NVLS_ENABLE", "0", 0);
    void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw RequestError(
            fmt::format("ranks: cards add up through NCCL 2, which is not there ({}): expected libnccl.so.2 where "
                        "the loader looks, or its path in FAULTLINE_NCCL",
                        ::dlerror()));
    Functions f{};
    const auto find = [&](auto& function, const char* symbol) {
        void* const found = ::dlsym(library, symbol);
        if (found == nullptr)
            throw RequestError(fmt::format("ranks: {}: has no {}: expected the library of NCCL 2", name, symbol));
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(f.version, "ncclGetVersion");
    find(f.error_text, "ncclGetErrorString");
    find(f.unique_id, "ncclGetUniqueId");
    find(f.init, "ncclCommInitRank");
    find(f.all_reduce, "ncclAllReduce");
    find(f.async_error, "ncclCommGetAsyncError");
    find(f.abort, "ncclCommAbort");
    find(f.destroy, "ncclCommDestroy");
    return f;
}

}  // namespace

struct Communicator::State {
    Functions nccl{};
    Ranks& ranks;
    Comm comm = nullptr;
    int exceptions = std::uncaught_exceptions();  // when it was made

    explicit State(Ranks& of) : ranks(of) {
        UniqueId id{};
        together(&ranks, [&] {
            nccl = load();
            if (ranks.first()) check(nccl.unique_id(&id), "making an id");
        });
        from_first(&ranks, std::as_writable_bytes(std::span(id.bytes)));
        // It waits for all ranks, in the library: one that fails here cannot tell the others, which watch for its end.
        watched(ranks, [&] {
            try {
                check(nccl.init(&comm, ranks.size(), id, ranks.rank()), "joining the ranks' cards");
            } catch (const WorkError& error) {
                throw LoneFailure(error.what());
            }
        });
    }
    void check(Result result, const char* what) const {
        if (result != success && result != in_progress)
            throw WorkError(
                fmt::format("device cuda: rank {}: NCCL: {}: {}", ranks.rank(), what, nccl.error_text(result)));
    }
    void end() noexcept {
        if (comm != nullptr) (void)nccl.abort(std::exchange(comm, nullptr));
    }
    [[nodiscard]] Result state_of_work() const {
        Result state = success;
        return nccl.async_error(comm, &state) == success ? state : in_progress;
    }
};

Communicator::Communicator(Ranks& ranks) : state_(std::make_unique<State>(ranks)) {}
void Communicator::call_off() noexcept { state_->end(); }
Communicator::~Communicator() {
    // A rank that fails must not wait for the others here: they learn that it is gone when its process ends.
    if (std::uncaught_exceptions() > state_->exceptions) state_->end();
    if (state_->comm != nullptr) (void)state_->nccl.destroy(state_->comm);
}

std::string Communicator::text() const {
    int code = 0;
    (void)state_->nccl.version(&code);  // 2 04 08 as 2408 up to 2.8, then 2 28 09 as 22809
    return code < 10000 ? fmt::format("NCCL {}.{}.{}", code / 1000, code % 1000 / 100, code % 100)
                        : fmt::format("NCCL {}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
}

void Communicator::add(float* values, std::size_t count, Stream stream) {
    state_->check(state_->nccl.all_reduce(values, values, count, float32, sum, state_->comm, stream),
                  "adding gradients");
}
void Communicator::add(double* values, std::size_t count, Stream stream) {
    state_->check(state_->nccl.all_reduce(values, values, count, float64, sum, state_->comm, stream), "adding losses");
}
void Communicator::largest(double* values, std::size_t count, Stream stream) {
    state_->check(state_->nccl.all_reduce(values, values, count, float64, max, state_->comm, stream),
                  "finding the largest");
}
void Communicator::add(Bf16* values, std::size_t count, Stream stream) {
    state_->check(state_->nccl.all_reduce(values, values, count, bfloat16, sum, state_->comm, stream),
                  "adding gradients");
}

void Communicator::wait(Stream stream) {
    // What is on the stream where NCCL has failed would never end. It is not called off here: NCCL waits in ncclCommAbort for the
    // graphs that hold its operations (since 2.26), and who has these is to say what becomes of them.
    on_device::wait(stream, state_->ranks, [this] { state_->check(state_->state_of_work(), "adding gradients"); });
}

}  // namespace faultline::gpt::on_device
