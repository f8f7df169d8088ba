// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/gather.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/cards.hpp>
#include <faultline/gpt_device/gather_kernels.hpp>
#include <faultline/ranks/ending.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt::on_device {
namespace {

using Word = std::uint32_t;
using BatchMemOp = CUresult(CUDAAPI*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

/// The driver's, by way of the runtime: so nothing is linked but that.
BatchMemOp batch_mem_op() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult state{};
    check(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000, cudaEnableDefault, &state),
          "looking for stream memory operations");
    if (state != cudaDriverEntryPointSuccess || found == nullptr)
        throw WorkError("device cuda: the driver has no stream memory operations of CUDA 12");
    return reinterpret_cast<BatchMemOp>(found);
}

/// Memory of less may stand in a block with other memory, all of which a handle would open.
constexpr std::size_t own_block = std::size_t{2} << 20;
/// Of a part, in the first exchange: a part has 256 bytes at least.
constexpr std::size_t first_words = 64;
std::size_t whole_blocks(std::size_t bytes) { return (bytes + own_block - 1) / own_block * own_block; }

/// The ranks' answers to the same question, "+" with what it is or "-" with why not. Whether all are good; else `why` is the
/// first that is not.
bool all_good(const std::vector<std::string>& answers, std::string& why) {
    const auto bad = std::ranges::find_if(answers, [](const std::string& a) { return !a.starts_with('+'); });
    if (bad == answers.end()) return true;
    why = fmt::format("rank {}: {}", bad - answers.begin(), bad->substr(std::min<std::size_t>(1, bad->size())));
    return false;
}

/// Whether a wait may have what other devices wrote flushed behind it (cuda.h: GPUDirect RDMA's writes, on some platforms). Ours do not
/// rest on it (gather.hpp), and it costs nothing to have it.
bool flushes() {
    int device = 0, can = 0;
    check(cudaGetDevice(&device), "asking the device");
    check(cudaDeviceGetAttribute(&can, cudaDevAttrCanFlushRemoteWrites, device), "asking the device");
    return can != 0;
}

template <class F>
std::string answer(F&& work) {
    try {
        return fmt::format("+{}", work());
    } catch (const WorkError& error) {
        (void)cudaGetLastError();  // it is not to be found by whoever asks next
        return fmt::format("-{}", error.what());
    }
}

}  // namespace

struct Gather::State {
    Ranks& ranks;
    std::size_t bytes;  // of a part
    BatchMemOp operate = nullptr;
    bool flushing = false;
    std::unique_ptr<Memory> memory;  // the others' parts, then words: full, empty, of each rank
    std::vector<char*> opened;       // [rank] its memory; null: one's own
    bool parted = false;
    int exceptions = std::uncaught_exceptions();

    State(Ranks& of, std::size_t part) : ranks(of), bytes(part), opened(static_cast<std::size_t>(of.size())) {}
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() { close(); }
    void close() noexcept {
        const auto alone = no_other_recording();
        for (char*& other : opened)
            if (other != nullptr) (void)cudaIpcCloseMemHandle(std::exchange(other, nullptr));
    }

    [[nodiscard]] std::size_t others() const { return opened.size() - 1; }
    /// Behind the parts. `base`: this rank's memory or another's.
    [[nodiscard]] Word* full(char* base, int of) const { return reinterpret_cast<Word*>(base + others() * bytes) + of; }
    [[nodiscard]] Word* empty(char* base, int of) const { return full(base, of) + ranks.size(); }
    template <class F>
    void for_others(F&& f) const {
        for (int i = 1; i < ranks.size(); ++i) {
            const int other = (ranks.rank() + i) % ranks.size();
            f(other, opened[static_cast<std::size_t>(other)]);
        }
    }

    void run(std::vector<CUstreamBatchMemOpParams>& operations, Stream stream, const char* what) const {
        if (operations.empty()) return;
        if (operate(stream, static_cast<unsigned>(operations.size()), operations.data(), 0) != CUDA_SUCCESS)
            throw WorkError(fmt::format("device cuda: {}: the driver refuses a stream memory operation", what));
    }
    static CUstreamBatchMemOpParams writing(Word* to, Word value) {
        CUstreamBatchMemOpParams p{};
        p.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        p.writeValue.address = reinterpret_cast<CUdeviceptr>(to);
        p.writeValue.value = value;
        p.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // behind a barrier: what was copied is seen first
        return p;
    }
    /// Until the words of all others are set, from that of rank 0; and they are taken back.
    void take(Word* words, Stream stream) const {
        std::vector<CUstreamBatchMemOpParams> operations;
        for_others([&](int other, char*) { operations.push_back(waiting(words + other)); });
        if (operations.empty()) return;
        run(operations, stream, "waiting for the other ranks");
        take_words(words, ranks.size(), ranks.rank(), stream);
    }
    [[nodiscard]] CUstreamBatchMemOpParams waiting(Word* word) const {
        CUstreamBatchMemOpParams p{};
        p.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        p.waitValue.address = reinterpret_cast<CUdeviceptr>(word);
        p.waitValue.value = 1;
        p.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
        if (flushing) p.waitValue.flags |= CU_STREAM_WAIT_VALUE_FLUSH;
        return p;
    }

    /// This rank's memory, and whether stream memory operations work on it. What others need to open it.
    std::string prepare() {
        const std::size_t words = 2 * opened.size();
        operate = batch_mem_op();
        flushing = flushes();
        memory = std::make_unique<Memory>(
            whole_blocks(others() * bytes + words * sizeof(Word)),
            fmt::format("{:.2f} GiB: the other ranks' gradients", static_cast<double>(others() * bytes) * 0x1p-30));
        std::vector<Word> values(words, 0);
        std::fill(values.begin() + ranks.size(), values.end(), Word{1});  // all empty
        const OwnedStream stream;
        upload(full(memory->data(), 0), values.data(), words * sizeof(Word), stream);
        for (std::size_t other = 0; other < others(); ++other)  // no first exchange of before is taken for this one's
            clear(memory->data() + other * bytes, first_words * sizeof(Word), stream);
        std::vector<CUstreamBatchMemOpParams> trial{writing(full(memory->data(), 0), 1),
                                                    waiting(full(memory->data(), 0))};
        run(trial, stream, "trying them");
        take_words(full(memory->data(), 0), 1, -1, stream);
        on_device::wait(stream);
        cudaIpcMemHandle_t handle{};
        check(cudaIpcGetMemHandle(&handle, memory->data()), "showing memory to other processes");
        return {reinterpret_cast<const char*>(&handle), sizeof handle};
    }
    void open(const std::vector<std::string>& answers) {
        const auto alone = no_other_recording();
        for (std::size_t other = 0; other < answers.size(); ++other) {
            if (other == static_cast<std::size_t>(ranks.rank())) continue;
            cudaIpcMemHandle_t handle{};
            if (answers[other].size() != 1 + sizeof handle) throw WorkError("a handle of another size");
            std::memcpy(&handle, answers[other].data() + 1, sizeof handle);
            void* at = nullptr;
            check(cudaIpcOpenMemHandle(&at, handle, cudaIpcMemLazyEnablePeerAccess), "opening another card's memory");
            opened[other] = static_cast<char*>(at);
        }
    }
};

std::unique_ptr<Gather> Gather::among(Ranks& ranks, std::size_t bytes, std::string& why,
                                      std::chrono::milliseconds patience) {
    if (ranks.local_size() != ranks.size()) {
        why = "the ranks are on several machines";
        return nullptr;
    }
    auto state = std::make_unique<State>(ranks, bytes);
    const std::vector<std::string> handles = all_texts(&ranks, answer([&] { return state->prepare(); }));
    if (!all_good(handles, why)) return nullptr;
    // From here on memory may be open elsewhere: where it cannot be, on all ranks alike, they part in order as at the end of a run.
    auto gather = std::unique_ptr<Gather>(new Gather(std::move(state)));
    const std::string opened = answer([&] {
        gather->state_->open(handles);
        return std::string();
    });
    if (all_good(all_texts(&ranks, opened), why) &&
        all_good(all_texts(&ranks, answer([&] { return gather->first_exchange(patience); })), why))
        return gather;
    return nullptr;
}

Gather::Gather(std::unique_ptr<State> state) : state_(std::move(state)) {}

Gather::~Gather() {
    if (state_->parted) return;
    let_go();
    // A rank that fails does not wait here: whoever catches it settles with the others, and may then end (cudaFree of memory that
    // another one has open is undefined).
    const bool failing = std::uncaught_exceptions() > state_->exceptions;
    try {
        if (!failing) part();
    } catch (const std::exception&) {
        (void)state_->memory.release();  // another one is gone
    }
    if (failing) (void)state_->memory.release();
}

void Gather::let_go() noexcept { state_->close(); }

void Gather::part() {
    let_go();
    (void)all_texts(&state_->ranks, "");
    state_->parted = true;
}

std::string Gather::first_exchange(std::chrono::milliseconds patience) {
    const auto value = [](int rank, std::size_t i) {
        return static_cast<Word>(0x9e3779b9U * (static_cast<Word>(i) * 64U + static_cast<Word>(rank) + 1U));
    };
    constexpr std::size_t count = first_words;
    const int self = state_->ranks.rank();
    std::vector<Word> sent(count), came(count);
    for (std::size_t i = 0; i < count; ++i) sent[i] = value(self, i);
    const OwnedStream stream;
    const Memory own(count * sizeof(Word), "a first exchange");
    upload(own.data(), sent.data(), count * sizeof(Word), stream);
    begin(stream);
    copy(0, own.data(), count * sizeof(Word), stream);
    done(stream);
    wait(stream);
    const auto until = std::chrono::steady_clock::now() + patience;
    try {
        on_device::wait(stream, state_->ranks, [&] {
            if (std::chrono::steady_clock::now() > until)
                throw WorkError(
                    fmt::format("a first exchange was not done after {} ms: expected the ranks' cards, or "
                                "ranks that share one, to get on beside each other",
                                patience.count()));
        });
    } catch (const WorkError&) {
        end_waiting(stream);
        throw;
    }
    for (int other = 0, place = 0; other < state_->ranks.size(); ++other) {
        if (other == self) continue;
        download(came.data(), state_->memory->data() + static_cast<std::size_t>(place++) * state_->bytes,
                 count * sizeof(Word), stream);
        for (std::size_t i = 0; i < count; ++i)
            if (came[i] != value(other, i))
                throw WorkError(fmt::format("a first exchange brought other values than rank {} sent", other));
    }
    release(stream);
    on_device::wait(stream);
    return {};
}

void Gather::end_waiting(Stream stream) const {
    using namespace std::chrono_literals;
    call_off();
    for (int i = 0; i < 100; ++i) {
        if (cudaStreamQuery(stream) != cudaErrorNotReady) return;
        std::this_thread::sleep_for(50ms);
    }
    end_at_once(state_->ranks, "faultline: device cuda: a wait for another rank cannot be called off", 1);
}

void Gather::begin(Stream stream) const { state_->take(state_->empty(state_->memory->data(), 0), stream); }

void Gather::copy(std::size_t offset, const void* from, std::size_t bytes, Stream stream) const {
    state_->for_others([&](int other, char* to) {
        const int self = state_->ranks.rank();
        const auto place = static_cast<std::size_t>(self < other ? self : self - 1);
        check(cudaMemcpyAsync(to + place * state_->bytes + offset, from, bytes, cudaMemcpyDeviceToDevice, stream),
              "copying to another card");
    });
}

void Gather::done(Stream stream) const {
    std::vector<CUstreamBatchMemOpParams> operations;
    state_->for_others(
        [&](int, char* base) { operations.push_back(State::writing(state_->full(base, state_->ranks.rank()), 1)); });
    state_->run(operations, stream, "telling the other ranks");
}

void Gather::wait(Stream stream) const { state_->take(state_->full(state_->memory->data(), 0), stream); }

void Gather::release(Stream stream) const {
    std::vector<CUstreamBatchMemOpParams> operations;
    state_->for_others(
        [&](int, char* base) { operations.push_back(State::writing(state_->empty(base, state_->ranks.rank()), 1)); });
    state_->run(operations, stream, "telling the other ranks");
}

GatheredParts Gather::parts() const {
    return {state_->memory->data(), state_->bytes, state_->ranks.rank(), state_->ranks.size()};
}
std::size_t Gather::room() const { return state_->others() * state_->bytes; }

void Gather::call_off() const noexcept {
    try {
        const std::vector<Word> set(2 * state_->opened.size(), 1);
        const OwnedStream stream;
        upload(state_->full(state_->memory->data(), 0), set.data(), set.size() * sizeof(Word), stream);
        on_device::wait(stream);
    } catch (const WorkError&) {
        return;  // the card has failed: nothing waits on it
    }
}

}  // namespace faultline::gpt::on_device
