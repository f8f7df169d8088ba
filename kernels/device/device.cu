// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/device.hpp>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <stdexcept>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <faultline/base/cuda_device.cuh>
#include <faultline/base/parallel.hpp>
#include <faultline/device/card_product.cuh>
#include <faultline/device/cuda_backend.cuh>
#include <faultline/device/gradients.cuh>
#include <faultline/device/refusals.hpp>
#include <faultline/device/room.hpp>
#include <faultline/device/truth.hpp>
#include <faultline/emulated/driver.hpp>

namespace faultline::device {

template <>
struct TeamOf<emulated::ForwardJob> {
    using Type = UnitTeam;
};
template <>
struct TeamOf<emulated::BackwardJob> {
    using Type = UnitTeam;
};

namespace {

/// Before the driver is first asked for anything.
void set_up_process() {
    static const bool done = [] {
        // Streams share so many queues, and wait for each other within one; what the user has set stands.
        (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
        return true;
    }();
    (void)done;
}

void expect_same_shapes(std::span<const HeadGroup> groups) {
    if (groups.empty()) throw std::invalid_argument("device: no head group");
    const HeadGroup& first = groups.front();
    for (const HeadGroup& g : groups) {
        const bool same = g.q.size() == first.q.size() && g.q.front().rows == first.q.front().rows &&
                          g.k.rows == first.k.rows && g.k.cols == first.k.cols && g.v.cols == first.v.cols &&
                          g.causal == first.causal && g.scale == first.scale && g.seed == first.seed &&
                          g.layer == first.layer && g.softcap == first.softcap && g.keep == first.keep &&
                          g.dropout.empty() == first.dropout.empty();
        if (!same)
            throw std::invalid_argument(
                "device: head groups of one call must have one shape, scale, softcap, dropout and seed");
    }
}

/// For one of so many calls that share the card: the more there are, the fewer teams each need have, and the larger and so the
/// faster a team's tiles may be.
emulated::Limits emulated_limits(std::size_t calls = 1) {
    return {std::max(1, wanted_teams / static_cast<int>(std::max<std::size_t>(calls, 1))), least_rows,
            static_cast<std::ptrdiff_t>((most_shared_bytes() - emulated::product::staging_bytes) / sizeof(double))};
}
class EmulatedBackend : public CudaBackend {
  public:
    EmulatedBackend(const emulated::Limits& limits, std::size_t tile_bytes, std::size_t tape_bytes,
                    std::size_t operand_bytes)
        : CudaBackend(tile_bytes, tape_bytes, operand_bytes), limits_(limits) {}
    [[nodiscard]] const emulated::Limits& limits() const { return limits_; }
    /// dq, or dk and dv, by gradients.hpp where the plan is for that.
    const int* begin(const emulated::BackwardJob& job, const emulated::FlatPlan& plan,
                     const std::vector<emulated::HeadProblem>& problems) {
        // Of each head: of a call's groups some may have a bias.
        const auto is_for_them = [&](const emulated::HeadProblem& head) { return has_gradients(plan, head, job.part); };
        if (!std::ranges::all_of(problems, is_for_them)) return nullptr;
        const int* const open = start(job, plan, problems);
        if (timed_parts != nullptr) timed_parts->heads_in_registers[name_of(job)] += done_heads(open, problems.size());
        return open;
    }

  private:
    const int* start(const emulated::BackwardJob& job, const emulated::FlatPlan& plan,
                     const std::vector<emulated::HeadProblem>& problems) {
        const Timed timed(stream(), Timed::job(name_of(job)));
        if (open_ == nullptr) {
            const std::size_t bytes = 2 * problems.size() * sizeof(int);  // beside what needs.hpp counts
            open_ = static_cast<int*>(allocated(bytes));
            check_cuda(cudaMemsetAsync(open_, 0, bytes, stream()), "clearing memory");
        }
        send();
        return start_gradients(job, plan, problems, open_, stream());
    }
    std::size_t done_heads(const int* open, std::size_t heads) {
        std::vector<int> left(heads);
        check_cuda(cudaMemcpyAsync(left.data(), open, heads * sizeof(int), cudaMemcpyDeviceToHost, stream()),
                   "fetching results");
        check_cuda(cudaStreamSynchronize(stream()), "fetching results");
        return static_cast<std::size_t>(std::ranges::count(left, 0));
    }

    emulated::Limits limits_;
    int* open_ = nullptr;  ///< [2, head]: heads whose dk and dv, and whose dq, are left to the job
};

/// Calls beside each other: a run of one head has few teams (one for each query tile), and a card has room for thousands.
constexpr int most_calls = 64;
static_assert(emulated::piece_bytes == alignment);
/// Of the free memory; the runtime, the code and the fragments of its pool take some.
constexpr double usable = 0.85;

class Device final : public AttentionBackend {
  public:
    Device() : room_(made_ready()) {}

    [[nodiscard]] std::string_view name() const override { return "cuda"; }
    [[nodiscard]] int calls_at_once(int) const override { return most_calls; }
    [[nodiscard]] GroupForward forward(const HeadGroup& in, const RoundingPlan& plan,
                                       Instrument* instrument) const override {
        return std::move(forward(std::span(&in, 1), plan, instrument).front());
    }
    [[nodiscard]] GroupBackward backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                         Instrument* instrument) const override {
        return std::move(backward(std::span(&in, 1), std::span(&fwd, 1), plan, instrument).front());
    }
    [[nodiscard]] GroupTruth truth(const TruthProblem& problem, const TruthOptions& options) const override {
        return device::attention_truth(problem, options);
    }
    [[nodiscard]] std::vector<GroupForward> forward(std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                                    Instrument* instrument = nullptr) const {
        if (beside_each_other(groups))
            return each_by_itself<GroupForward>(
                groups, [&](std::size_t g) { return forward(groups.subspan(g, 1), plan, instrument); });
        Call call(*this, groups, plan, instrument, emulated::Passes::forward);
        return emulated::forward(call.backend, groups, plan, instrument);
    }
    [[nodiscard]] std::vector<GroupBackward> backward(std::span<const HeadGroup> groups,
                                                      std::span<const GroupForward> forwards, const RoundingPlan& plan,
                                                      Instrument* instrument = nullptr) const {
        if (beside_each_other(groups))
            return each_by_itself<GroupBackward>(groups, [&](std::size_t g) {
                return backward(groups.subspan(g, 1), forwards.subspan(g, 1), plan, instrument);
            });
        Call call(*this, groups, plan, instrument, emulated::Passes::backward);
        return emulated::backward(call.backend, groups, forwards, plan, instrument);
    }
    [[nodiscard]] GroupAttention both(const HeadGroup& in, const RoundingPlan& plan) const override {
        return both(in, plan, 1);
    }
    [[nodiscard]] Attention attention(std::span<const HeadGroup> groups, const RoundingPlan& plan) const {
        Attention out;
        if (!beside_each_other(groups)) {
            out.forward = forward(groups, plan);
            out.backward = backward(groups, out.forward, plan);
            for (GroupForward& group : out.forward) leave_saved_out(group);
            return out;
        }
        out.forward.resize(groups.size());
        out.backward.resize(groups.size());
        parallel_for(groups.size(), 0, [&](std::size_t g) {
            GroupAttention one = both(groups[g], plan, groups.size());
            out.forward[g] = std::move(one.forward);
            out.backward[g] = std::move(one.backward);
        });
        return out;
    }
    void expect_room(const HeadGroup& in, const RoundingPlan& plan, const Instrument* instrument) const override {
        const std::span one(&in, 1);
        expect(room_, need_of(one, plan, instrument, emulated::Passes::forward), plan);
        if (!in.dout.empty()) expect(room_, need_of(one, plan, instrument, emulated::Passes::backward), plan);
    }
    void expect_room_for_truth(const TruthProblem& problem) const override { device::expect_room_for_truth(problem); }
    [[nodiscard]] std::size_t all() const { return room_.all(); }
    [[nodiscard]] Room& shared() const { return room_; }

  private:
    static void leave_saved_out(GroupForward& group) {
        for (HeadForward& head : group.heads) head.p = head.capped = Matrix();
    }
    /// One of `beside` calls.
    [[nodiscard]] GroupAttention both(const HeadGroup& in, const RoundingPlan& plan, std::size_t beside) const {
        const std::span one(&in, 1);
        GroupAttention out;
        if (bytes_of(need_of(one, plan, nullptr, emulated::Passes::both)) > room_.all()) {  // one by one takes less
            out.forward = std::move(forward(one, plan).front());
            out.backward = std::move(backward(one, std::span(&out.forward, 1), plan).front());
            leave_saved_out(out.forward);
            return out;
        }
        Call call(*this, one, plan, nullptr, emulated::Passes::both, beside);
        emulated::Attention all = emulated::attention(call.backend, one, plan, false);
        out.forward = std::move(all.forward.front());
        out.backward = std::move(all.backward.front());
        return out;
    }
    /// What tiles, and what tapes, of a call may have together, but of one team: so that many calls fit beside each other.
    static std::size_t share(const Room& room) { return room.all() / most_calls; }
    static std::size_t bytes_of(const Room& room, const emulated::Need& need) {
        return need.operands + need.tile_bytes(share(room)) + need.tape_bytes(share(room));
    }
    [[nodiscard]] std::size_t bytes_of(const emulated::Need& need) const { return bytes_of(room_, need); }
    static void expect(const Room& room, const emulated::Need& need, const RoundingPlan& plan) {
        if (bytes_of(room, need) > room.all())
            throw NoRoom(no_room(plan.name, bytes_of(room, need), need.tape_bytes(share(room)), room.all()));
    }
    static emulated::Need need_of(std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                  const Instrument* instrument, emulated::Passes passes,
                                  const emulated::Limits& limits = emulated_limits()) {
        return emulated::NeedOf(groups, plan, limits, instrument).of(passes);
    }
    /// Memory for one call, while it runs. beside: so many calls are known to begin with it; those that are under way count too.
    /// Where larger tiles have no room, as a call by itself, which is what expect_room() speaks of.
    class Call {
        struct Sized {
            emulated::Limits limits;
            emulated::Need need;
        };
        struct Counted {
            std::atomic<std::size_t>& calls;
            explicit Counted(std::atomic<std::size_t>& of) : calls(of) { ++calls; }
            Counted(const Counted&) = delete;
            Counted& operator=(const Counted&) = delete;
            ~Counted() { --calls; }
        };
        static Sized sized(const Device& device, std::span<const HeadGroup> groups, const RoundingPlan& plan,
                           const Instrument* instrument, emulated::Passes passes, std::size_t beside) {
            const emulated::Limits shared = emulated_limits(std::max(beside, device.calls_.load()));
            emulated::Need need = need_of(groups, plan, instrument, passes, shared);
            if (device.bytes_of(need) <= device.room_.all()) return {shared, std::move(need)};
            need = need_of(groups, plan, instrument, passes);
            expect(device.room_, need, plan);
            return {emulated_limits(), std::move(need)};
        }
        Counted counted_;
        Sized sized_;
        Lease lease_;

      public:
        EmulatedBackend backend;

        Call(const Device& device, std::span<const HeadGroup> groups, const RoundingPlan& plan,
             const Instrument* instrument, emulated::Passes passes, std::size_t beside = 1)
            : counted_(device.calls_),
              sized_(sized(device, groups, plan, instrument, passes, beside)),
              lease_(device.room_, device.bytes_of(sized_.need)),
              backend(sized_.limits, sized_.need.tile_bytes(share(device.room_)), share(device.room_),
                      sized_.need.operands) {}
    };
    /// Large groups are calls of several threads, so that the host casts and sends some while the card computes others; small
    /// ones are one launch. With a clock, too: its parts are one after the other.
    static bool beside_each_other(std::span<const HeadGroup> groups) {
        constexpr std::size_t large = std::size_t{1} << 17;  // elements of q: some milliseconds of either
        const HeadGroup& g = groups.front();
        return groups.size() > 1 && timed_parts == nullptr &&
               g.q.size() * static_cast<std::size_t>(g.q.front().rows * g.k.cols) >= large;
    }
    template <class Out, class Run>
    static std::vector<Out> each_by_itself(std::span<const HeadGroup> groups, Run&& run) {
        std::vector<Out> all(groups.size());
        parallel_for(groups.size(), 0, [&](std::size_t g) { all[g] = std::move(run(g).front()); });
        return all;
    }
    /// How much of its memory may be used.
    static std::size_t made_ready() {
        set_up_process();
        // Threads that wait leave the processor to those that compare with the truth.
        (void)cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync);
        (void)cudaGetLastError();
        const Info found = info();
        expect_code(found);
        keep_freed_memory();
        int device = 0;
        check_cuda(cudaGetDevice(&device), "choosing a device");
        cudaMemPool_t pool{};
        check_cuda(cudaDeviceGetDefaultMemPool(&pool, device), "asking for the pool of its memory");
        std::uint64_t keep = UINT64_MAX;  // what a call gives back the next one takes
        check_cuda(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
                   "setting the pool of its memory");
        return std::min(static_cast<std::size_t>(static_cast<double>(found.free_memory) * usable), memory_limit());
    }
    /// A card that is newer than the build has code for takes no kernel.
    static void expect_code(const Info& card) {
        cudaFuncAttributes attributes{};
        const cudaError_t status = cudaFuncGetAttributes(&attributes, run_job<emulated::ForwardJob>);
        if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
            (void)cudaGetLastError();
            throw WorkError(no_code(card.name, card.major, card.minor, FAULTLINE_DEVICE_ARCHITECTURES));
        }
        check_cuda(status, "loading the kernels");
    }
    /// What a call's vectors of megabytes give back the next call takes. By default each comes from the system and goes back to
    /// it, page by page, and most of the host's time is the system's (docs/results/emulated-device.md).
    static void keep_freed_memory() {
#ifdef __GLIBC__
        (void)mallopt(M_MMAP_THRESHOLD, 32 << 20);  // glibc's largest for a heap of a thread
        (void)mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
    }
    mutable Room room_;
    mutable std::atomic<std::size_t> calls_{0};  ///< under way
};

const Device& device() {
    static const Device one;
    return one;
}

}  // namespace

bool is_built() { return true; }

void time_parts(Parts* parts) {
    unsigned long long blocks = 0;
    if (timed_parts != nullptr) {
        check_cuda(cudaMemcpyFromSymbol(&blocks, card::blocks_left, sizeof blocks), "fetching results");
        timed_parts->blocks_left = blocks;
    }
    blocks = 0;
    if (parts != nullptr) check_cuda(cudaMemcpyToSymbol(card::blocks_left, &blocks, sizeof blocks), "sending data");
    timed_parts = parts;
}

Info info() {
    set_up_process();
    expect_cuda_device();
    int device = 0;
    check_cuda(cudaGetDevice(&device), "choosing a device");
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "asking the device");
    if (properties.major < 8)
        throw WorkError(std::string("device cuda: ") + properties.name + " has compute capability " +
                        std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                        ": expected 8.0 or later");
    Info found{properties.name, properties.major, properties.minor, properties.totalGlobalMem, 0};
    std::size_t all = 0;
    check_cuda(cudaMemGetInfo(&found.free_memory, &all), "asking for memory");
    return found;
}

const AttentionBackend& backend() { return device(); }

std::size_t room() { return device().all(); }

Room& shared_room() { return device().shared(); }

std::vector<GroupForward> attention_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan) {
    expect_same_shapes(groups);
    return device().forward(groups, plan);
}

std::vector<GroupBackward> attention_backward(std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
                                              const RoundingPlan& plan) {
    expect_same_shapes(groups);
    if (forwards.size() != groups.size()) throw std::invalid_argument("device: one forward for each head group");
    return device().backward(groups, forwards, plan);
}

Attention attention(std::span<const HeadGroup> groups, const RoundingPlan& plan) {
    expect_same_shapes(groups);
    return device().attention(groups, plan);
}

}  // namespace faultline::device
