// SPDX-License-Identifier: Apache-2.0
// NCCL, found when a run of several ranks begins. Private to this folder.
//
// The few functions that we use are declared here and looked up in libnccl.so.2 at run time: the library is 300 MB, which no
// build and no machine with one card should have to carry, and where there is one (PyTorch brings it) its functions and
// numbers have been the same for every version 2 (nccl.h of 2.4 to 2.32), which is what the .2 of its name promises.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <faultline/gpt_device/kernels.hpp>
#include <faultline/ranks/ranks.hpp>

namespace faultline::gpt::on_device {

class Communicator {
  public:
    /// Loads the library that FAULTLINE_NCCL names, or libnccl.so.2 where the loader finds it, and joins the ranks' cards, one
    /// each: the first rank's unique id goes to the others by `ranks`, which outlive this. All ranks make one at the same time.
    /// NVLink multicast (NVLS) stays off unless NCCL_NVLS_ENABLE is set. RequestError where there is no library, on all ranks.
    explicit Communicator(Ranks& ranks);
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;
    /// "NCCL 2.28.9".
    [[nodiscard]] std::string text() const;

    /// The sum over ranks (or the largest), in place, on the stream; may be recorded in a graph. The order in which an element's terms are added is
    /// NCCL's; of two ranks there is one addition, and so one result.
    void add(float* values, std::size_t count, Stream stream);
    void add(double* values, std::size_t count, Stream stream);
    void largest(double* values, std::size_t count, Stream stream);
    void add(Bf16* values, std::size_t count, Stream stream);  ///< each addition rounds to bf16

    /// Waits for the stream; throws where meanwhile NCCL fails or another rank is gone (PeerLost). What is on its way is not
    /// called off then.
    void wait(Stream stream);
    /// Ends what is on its way, so that the device can be taken apart; only while no graph holds an operation of it. Nothing but the
    /// end of this may come afterwards.
    void call_off() noexcept;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace faultline::gpt::on_device
