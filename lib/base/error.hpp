// SPDX-License-Identifier: Apache-2.0
// The two ways in which a command ends badly. Every message is one sentence that names the file, the field and what was
// expected, e.g.
//   run7.safetensors: tensor "layer7.k": shape [1, 8, 512, 64] does not match "layer7.q" [1, 8, 512, 128]: head_dim must agree
#pragma once

#include <stdexcept>
#include <string>

namespace faultline {

/// The request was wrong (bad file, field, option): exit status 2, nothing was written.
class RequestError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// The request was fine and the work failed (disk full, device lost): exit status 1.
class WorkError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace faultline
