// SPDX-License-Identifier: Apache-2.0
// How work that several ranks share ends badly.
#pragma once

#include <stdexcept>
#include <string>

#include <faultline/base/error.hpp>

namespace faultline {

/// Another rank has ended before its time.
class PeerLost : public WorkError {
  public:
    using WorkError::WorkError;
};

/// A failure of this rank alone while the others wait for it where no word of it reaches them: it is said here, and they are to find
/// this rank gone.
class LoneFailure : public WorkError {
  public:
    using WorkError::WorkError;
};

/// A failure that every rank knows of: all of them end with it, and the first alone says it.
class SharedFailure : public std::runtime_error {
  public:
    SharedFailure(const std::string& sentence, bool refused, bool silent)
        : std::runtime_error(sentence), refused_(refused), silent_(silent) {}
    [[nodiscard]] bool refused() const { return refused_; }  ///< of a RequestError; else of a WorkError
    [[nodiscard]] bool silent() const { return silent_; }    ///< another rank says it

  private:
    bool refused_, silent_;
};

}  // namespace faultline
