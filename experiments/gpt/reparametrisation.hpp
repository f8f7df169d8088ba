// SPDX-License-Identifier: Apache-2.0
// sigma-reparametrisation (Zhai et al., arXiv 2303.06296): the linear layers use gamma W / sigma, sigma the largest
// singular value of W by power iteration, whose vectors are constants to the gradient.
#pragma once

#include <span>
#include <vector>

#include <faultline/gpt/parameters.hpp>

namespace faultline::gpt {

template <class T>
class SigmaReparametrisation {
  public:
    /// Nothing where the layout has no gammas.
    explicit SigmaReparametrisation(const ParameterLayout& layout);
    [[nodiscard]] bool active() const { return !entries_.empty(); }
    /// Two more steps of power iteration (a hundred the first time), then effective = gamma W / sigma for the matrices
    /// that have a gamma. `effective` holds a copy of the weights.
    void apply(std::span<const T> weights, std::span<T> effective);
    /// The gradient with respect to the effective weights becomes that with respect to W and gamma.
    void pull_back(std::span<const T> weights, std::span<T> gradient) const;
    /// The right vectors as they stood two steps ago, for a checkpoint: the apply() after restore() repeats the last one.
    [[nodiscard]] std::span<const T> state() const { return before_; }
    void restore(std::vector<T> state) {
        vectors_ = std::move(state);
        started_ = true;
    }

  private:
    struct Entry {
        Parameter matrix;
        std::ptrdiff_t gamma = 0;
        std::ptrdiff_t right = 0;  ///< offset of its vector in vectors_
        std::vector<T> left;
        T sigma = 0;
    };
    void iterate(std::span<const T> weights, int steps);
    std::vector<Entry> entries_;
    std::vector<T> vectors_, before_;
    bool started_ = false;
};

}  // namespace faultline::gpt
