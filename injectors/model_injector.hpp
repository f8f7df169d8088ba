// SPDX-License-Identifier: Apache-2.0
// A fault at a site of the model: a pure function on a matrix, and the hook that calls it where the value stands.
#pragma once

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include <faultline/injectors/apply.hpp>
#include <faultline/injectors/model_hook.hpp>

namespace faultline {

/// Changes `values` where the fault is active at this step and layer, and says what was done; does nothing (and touches no
/// bit) otherwise. `heads`: the columns as blocks of heads, 1 where they are none. `tile` tells apart the matrices of one
/// (step, layer): the row block, the first or second addition of a layer, the parameter of an update. The two columns of
/// layer_norm_statistics are of different kinds and have each their own rms. `format`: what the values are held in besides
/// T; `exact` for T alone. RequestError where the fault names a kernel site, or a column that is not there.
template <class T>
Realised inject(const Fault& fault, std::int64_t step, int layer, int heads, std::uint64_t tile, MatrixView<T> values,
                Format format = exact);

/// The number of the tile that stands there, as inject() and a ModelInjector have it.
[[nodiscard]] std::uint64_t model_tile(const ModelAt& where);

/// One fault as a ModelHook. What it does depends on where it is called and not on the order of calls; the statistics are
/// summed in the order of places, so they do not depend on the number of threads either.
class ModelInjector final : public ModelHook {
  public:
    /// `heads`: blocks of columns, where the columns divide. `format`: as above.
    ModelInjector(const Fault& fault, int heads, Format format = exact);
    [[nodiscard]] bool watches(ModelSite site, int layer) const override;
    void at(ModelSite site, const ModelAt& where, MatrixView<float> value,
            std::span<const MatrixView<const float>> operands) override;

    /// What was done since the last reset, over all layers and by layer. Not while at() may run.
    [[nodiscard]] Realised total() const;
    [[nodiscard]] Realised of_layer(int layer) const;
    void reset();

    using Place = std::tuple<int, int, std::uint64_t>;  ///< layer, micro step, tile
    /// What was done by place since the last reset; and a place of another process's, where this one has none of the name.
    [[nodiscard]] const std::map<Place, Realised>& places() const { return realised_; }
    void add_place(const Place& place, const Realised& found) { realised_.try_emplace(place, found); }

  private:
    Fault fault_;
    ModelSite site_;
    int heads_;
    Format format_;
    std::mutex mutex_;
    std::map<Place, Realised> realised_;
};

}  // namespace faultline
