// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/reparametrisation.hpp>

#include <cmath>

#include <faultline/gemm/gemm.hpp>

namespace faultline::gpt {
namespace {

/// x over its length; returns the length.
template <class T>
T normalize(std::span<T> x) {
    T squares = 0;
    for (const T v : x) squares += v * v;
    const T length = std::sqrt(squares);
    if (length > 0)
        for (T& v : x) v /= length;
    return length;
}

}  // namespace

template <class T>
SigmaReparametrisation<T>::SigmaReparametrisation(const ParameterLayout& layout) {
    const std::span<const Parameter> all = layout.all();
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (layout.gamma_of(i) < 0) continue;
        const auto right = static_cast<std::ptrdiff_t>(vectors_.size());
        entries_.push_back({all[i], all[static_cast<std::size_t>(layout.gamma_of(i))].offset, right,
                            std::vector<T>(static_cast<std::size_t>(all[i].rows)), T(0)});
        // A start that no matrix of ours is orthogonal to: all of one sign would be, to a matrix of centred columns.
        for (std::ptrdiff_t j = 0; j < all[i].cols; ++j)
            vectors_.push_back(static_cast<T>(std::cos(1.0 + static_cast<double>(j) * 2.399963229728653)));
    }
}

template <class T>
void SigmaReparametrisation<T>::iterate(std::span<const T> weights, int steps) {
    for (Entry& e : entries_) {
        const MatrixView<const T> w = e.matrix.of(weights);
        const MatrixView<T> left(e.left.data(), w.rows, 1), right(vectors_.data() + e.right, w.cols, 1);
        for (int step = 0; step < steps; ++step) {
            gemm(Transpose::no, w, Transpose::no, MatrixView<const T>(right), left);
            normalize(std::span(e.left));
            gemm(Transpose::yes, w, Transpose::no, MatrixView<const T>(left), right);
            e.sigma = normalize(std::span(right.data, static_cast<std::size_t>(w.cols)));
        }
    }
}

template <class T>
void SigmaReparametrisation<T>::apply(std::span<const T> weights, std::span<T> effective) {
    if (!started_) iterate(weights, 98);
    started_ = true;
    before_ = vectors_;
    iterate(weights, 2);
    for (const Entry& e : entries_) {
        const MatrixView<const T> w = e.matrix.of(weights);
        const T factor = weights[static_cast<std::size_t>(e.gamma)] / e.sigma;
        const MatrixView<T> to = e.matrix.of(effective);
        for (std::ptrdiff_t i = 0; i < w.rows; ++i)
            for (std::ptrdiff_t j = 0; j < w.cols; ++j) to(i, j) = w(i, j) * factor;
    }
}

/// With G the gradient of gamma W/sigma: dgamma = <G, W>/sigma, dW = gamma/sigma (G - (<G, W>/sigma) u v^T).
template <class T>
void SigmaReparametrisation<T>::pull_back(std::span<const T> weights, std::span<T> gradient) const {
    for (const Entry& e : entries_) {
        const MatrixView<const T> w = e.matrix.of(weights);
        const MatrixView<T> g = e.matrix.of(gradient);
        const T* right = vectors_.data() + e.right;
        double dot = 0;
        for (std::ptrdiff_t i = 0; i < w.rows; ++i)
            for (std::ptrdiff_t j = 0; j < w.cols; ++j)
                dot += static_cast<double>(g(i, j)) * static_cast<double>(w(i, j));
        const T along = static_cast<T>(dot) / e.sigma;
        const T factor = weights[static_cast<std::size_t>(e.gamma)] / e.sigma;
        for (std::ptrdiff_t i = 0; i < w.rows; ++i)
            for (std::ptrdiff_t j = 0; j < w.cols; ++j)
                g(i, j) = factor * (g(i, j) - along * e.left[static_cast<std::size_t>(i)] * right[j]);
        gradient[static_cast<std::size_t>(e.gamma)] += along;
    }
}

template class SigmaReparametrisation<float>;
template class SigmaReparametrisation<double>;

}  // namespace faultline::gpt
