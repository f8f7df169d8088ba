// SPDX-License-Identifier: Apache-2.0
// Parts copied between two processes, of one card and where there are two of two: what came against what was sent, step by step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include <fmt/format.h>

#include <faultline/gpt_device/cards.hpp>
#include <faultline/gpt_device/gather.hpp>
#include <faultline/ranks/errors.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "two_processes.hpp"

namespace faultline::gpt::on_device {
namespace {

using namespace std::chrono_literals;
using test::on_two_processes;
using testing::HasSubstr;

using Word = std::uint32_t;
/// Of step, rank and place: no two that could be taken for each other are equal (odd factors, so one to one in each).
Word sent(int step, int rank, std::size_t i) {
    return static_cast<Word>(i) * 0x9e3779b1U + static_cast<Word>(2 * step + rank) * 0x85ebca6bU;
}

/// A rank's side of a step, of parts of `count` words, recorded once: its own part from the host, copies in two pieces on another stream
/// as during a backward, and what came back to the host before it is released.
class Steps {
  public:
    Steps(const Gather& gather, std::size_t count)
        : count_(count), own_(bytes(), "own part"), outgoing_(bytes()), incoming_(bytes()), graph_(stream_, [&] {
              upload(own_.data(), outgoing_.data(), bytes(), stream_);
              side_.follow(stream_);
              gather.begin(side_.stream());
              const std::size_t half = bytes() / 512 * 256;
              gather.copy(half, own_.data() + half, bytes() - half, side_.stream());
              gather.copy(0, own_.data(), half, side_.stream());
              gather.done(side_.stream());
              side_.join(stream_);
              gather.wait(stream_);
              download_later(incoming_.data(), gather.parts().others, bytes(), stream_);
              gather.release(stream_);
          }) {}
    void launch(int step, int rank) {
        for (std::size_t i = 0; i < count_; ++i) words(outgoing_)[i] = sent(step, rank, i);
        graph_.launch(stream_);
    }
    /// Words of the other rank's part that are not those of the step.
    [[nodiscard]] std::size_t wrong(int step, int other) const {
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < count_; ++i) wrong += words(incoming_)[i] != sent(step, other, i);
        return wrong;
    }
    [[nodiscard]] Stream stream() const { return stream_; }

  private:
    [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(Word); }
    static Word* words(const PinnedMemory& memory) { return reinterpret_cast<Word*>(memory.data()); }
    std::size_t count_;
    OwnedStream stream_;
    SideStream side_;
    Memory own_;
    PinnedMemory outgoing_, incoming_;
    Graph graph_;
};

TEST(GatherOfProcesses, BringsEachStepsPartsWhole) {
    NEEDS_HOPPER();
    on_two_processes([](Ranks& self) {
        for (const std::size_t count : {std::size_t{64}, std::size_t{6'000'000} / 64 * 64}) {
            std::string why;
            const auto gather = Gather::among(self, count * sizeof(Word), why);
            ASSERT_NE(gather, nullptr) << why;
            Steps steps(*gather, count);
            const int many = count < 1000 ? 2000 : 60;
            for (int step = 0; step < many; ++step) {
                // Now the one is late, now the other.
                if (step % 7 == 3 * self.rank()) std::this_thread::sleep_for(2ms);
                steps.launch(step, self.rank());
                wait(steps.stream(), self, [] {});
                if (const std::size_t wrong = steps.wrong(step, 1 - self.rank());
                    wrong > 0)  // the other one is to hear of it
                    throw WorkError(fmt::format("step {}: {} of {} words", step, wrong, count));
            }
        }
    });
}

// The other one ends while this one's card waits for it; and the wait can be called off.
TEST(GatherOfProcesses, ARankThatIsGoneIsNotWaitedFor) {
    NEEDS_HOPPER();
    on_two_processes([](Ranks& self) {
        std::string why;
        auto gather = Gather::among(self, 4096, why);
        ASSERT_NE(gather, nullptr) << why;
        Steps steps(*gather, 1024);
        if (self.rank() == 1) std::_Exit(0);
        steps.launch(0, 0);
        EXPECT_THROW(wait(steps.stream(), self, [] {}), PeerLost);
        gather->call_off();
        for (int i = 0; i < 1000 && !idle(steps.stream()); ++i) std::this_thread::sleep_for(10ms);
        EXPECT_TRUE(idle(steps.stream()));
    });
}

/// A rank that is slow to hear of the others, from a message on.
class SlowRanks final : public Ranks {
  public:
    SlowRanks(Ranks& ranks, int fast) : Ranks(ranks.rank(), ranks.size()), ranks_(ranks), fast_(fast) {}
    [[nodiscard]] std::string transport() const override { return ranks_.transport(); }
    void send(int to, std::span<const std::byte> bytes) override { ranks_.send(to, bytes); }
    void receive(int from, std::span<std::byte> bytes) override {
        ranks_.receive(from, bytes);
        if (--fast_ == 0) std::this_thread::sleep_for(1500ms);
    }
    [[nodiscard]] bool lost() const override { return ranks_.lost(); }
    void abandon() noexcept override { ranks_.abandon(); }

  private:
    Ranks& ranks_;
    int fast_;
};

// Between processes that do not get on beside each other all ranks hear of it, in words. The second rank gets two messages, each a size and a
// text, before the first exchange.
TEST(GatherOfProcesses, AFirstExchangeThatDoesNotComeIsSaid) {
    NEEDS_HOPPER();
    on_two_processes([](Ranks& self) {
        SlowRanks slow(self, self.rank() == 1 ? 4 : 0);
        std::string why;
        EXPECT_EQ(Gather::among(slow, 4096, why, 200ms), nullptr);
        EXPECT_THAT(why, HasSubstr("rank 0: a first exchange was not done after 200 ms: expected the ranks' cards"));
    });
}

}  // namespace
}  // namespace faultline::gpt::on_device
