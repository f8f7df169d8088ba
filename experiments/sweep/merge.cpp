// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/merge.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/report.hpp>
#include <faultline/dissociation/single_run.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::sweep {
namespace {

namespace fs = std::filesystem;

/// A series of the records, over all of them.
struct Series {
    About about;
    std::vector<Axis> axes;  ///< of the record that has most of them; the first is the step
    struct Part {
        RecordFile::VirtualRow row;  ///< but for its block
        std::vector<Axis> axes;
    };
    std::vector<Part> parts;

    /// Where a part lies: an axis that its record does not have (a model of one layer has no values by layer) has one entry.
    [[nodiscard]] std::vector<RecordFile::VirtualRow> rows() const {
        std::vector<RecordFile::VirtualRow> out;
        for (const Part& part : parts) {
            out.push_back(part.row);
            for (const Axis& axis : axes) {
                const auto own = std::ranges::find(part.axes, axis.name, &Axis::name);
                out.back().block.push_back(own == part.axes.end() ? 1 : own->size);
            }
        }
        return out;
    }
};

/// What the records have below steps/, by name, in the order of the first record that has it.
class AllSeries {
  public:
    void add(std::int64_t row, const std::string& path, const std::string& name_in_file) {
        const RecordReader reader(path);
        for (const std::string& dataset : reader.datasets()) {
            if (!dataset.starts_with("steps/")) continue;
            const std::vector<Axis> axes = reader.axes(dataset);
            const std::string name = dataset.substr(dataset.find('/') + 1);
            if (axes.empty() || axes.front().name != "step" || name == "step") continue;  // labels of a dimension
            if (name == "checksum")
                continue;  // of the record's own series; whoever follows the link below runs/ has it
            Series& series = named(name);
            if (series.parts.empty())
                series.about = {reader.attribute(dataset, "long_name").value_or(""),
                                reader.attribute(dataset, "units").value_or("")};
            if (axes.size() > series.axes.size()) series.axes = axes;
            Series::Part part{{row, name_in_file, "/" + dataset, {}, {}}, axes};
            for (const Axis& axis : axes) {
                part.row.shape.push_back(axis.size);
                std::int64_t& most = longest_[axis.name];
                most = std::max(most, axis.size);
            }
            series.parts.push_back(std::move(part));
        }
    }
    /// Sizes of the dimensions, over all series.
    [[nodiscard]] const std::map<std::string, std::int64_t>& longest() const { return longest_; }
    [[nodiscard]] const std::vector<std::pair<std::string, Series>>& all() const { return all_; }

  private:
    Series& named(const std::string& name) {
        for (auto& [known, series] : all_)
            if (known == name) return series;
        return all_.emplace_back(name, Series{}).second;
    }
    std::vector<std::pair<std::string, Series>> all_;
    std::map<std::string, std::int64_t> longest_;
};

void write_steps(const std::vector<Merged>& merged, RecordFile& file, const std::string& folder) {
    std::vector<std::string> names, recipes, sources, interventions;
    std::vector<std::int64_t> seeds, steps;
    AllSeries series;
    for (const Merged& one : merged)
        for (std::size_t i = 0; i < one.cells.size(); ++i) {
            const Cell& cell = one.cells[i];
            const RunResult& run = one.matrix.runs[i];
            const std::string record = files_of(folder, cell.name).record;
            if (run.finished && fs::exists(record))
                series.add(static_cast<std::int64_t>(names.size()), record, "runs/" + cell.name + ".h5");
            names.push_back(cell.name);
            recipes.push_back(cell.recipe);
            sources.push_back(cell.source);
            interventions.push_back(cell.intervention);
            seeds.push_back(static_cast<std::int64_t>(cell.seed));
            steps.push_back(run.finished ? run.steps : 0);
        }
    file.coordinate("steps/run", names, {"run of the sweep, by its record's name"});
    for (const auto& [axis, size] : series.longest()) {
        std::vector<std::int64_t> values(static_cast<std::size_t>(size));
        std::iota(values.begin(), values.end(), axis == "singular_value" ? 1 : 0);  // ranks, as in the records
        file.coordinate("steps/" + axis, values, {axis == "singular_value" ? "rank of the singular value" : axis});
    }
    const std::vector<Axis> by_run{{"run", static_cast<std::int64_t>(names.size())}};
    file.write_strings("steps/recipe", recipes, by_run, {"recipe of the run"});
    file.write_strings("steps/source", sources, by_run, {"source of the run"});
    file.write_strings("steps/intervention", interventions, by_run, {"intervention of the run"});
    file.write("steps/seed", seeds, by_run, {"seed of the run"});
    file.write("steps/steps", steps, by_run, {"steps done; 0 of a run that is not"});
    for (const auto& [name, one] : series.all()) {
        std::vector<Axis> axes = by_run;
        for (const Axis& axis : one.axes) axes.push_back({axis.name, series.longest().at(axis.name)});
        file.write_virtual("steps/" + name, one.rows(), axes, one.about);
    }
}

/// The key is the hash of what the record must say it was made with (MatrixRun::identity). A run that ended in its first step
/// has no record.
void expect_record_of(const Cell& cell, const std::string& record) {
    if (!fs::exists(record)) return;
    if (key_of(RecordReader(record).manifest().config_toml) != cell.key)
        throw RequestError(fmt::format("{}: is the run of another configuration: expected that of {}",
                                       escaped(record, record.size()), cell.name));
}

}  // namespace

Outcome outcome_of(const std::string& folder, const Cell& cell, const CellState& state) {
    const RunPlan plan{cell.source, cell.intervention, cell.seed};
    const std::string record = files_of(folder, cell.name).record;
    Outcome out;
    if (is_done(state.state)) {
        try {
            expect_record_of(cell, record);
            out.result =
                result_of(plan, record, {true, state.state == State::not_finite ? state.what : "", 0, state.steps});
            if (state.state != State::done || out.result.steps == state.steps) return out;
            out.trouble = fmt::format("{}: holds {} steps: expected the {} that its run has made",
                                      escaped(record, record.size()), out.result.steps, state.steps);
        } catch (const RequestError& error) {
            out.trouble = error.what();
        } catch (const WorkError& error) {
            out.trouble = error.what();
        }
        out.trouble += "; where the file is removed the run is made anew";
    }
    out.result = {};
    out.result.source = plan.source;
    out.result.intervention = plan.intervention;
    out.result.seed = plan.seed;
    return out;
}

Merged collect(const std::string& folder, const std::string& recipe, const MatrixConfig& config,
               const std::vector<Cell>& cells) {
    Merged out{recipe, {config, {}}, cells};
    for (const Cell& cell : cells) out.matrix.runs.push_back(outcome_of(folder, cell, state_of(folder, cell)).result);
    return out;
}

void write(const std::vector<Merged>& all, RecordFile& file, const std::string& folder) {
    if (all.size() == 1) {
        faultline::write(all.front().matrix, file, "runs");
    } else {
        bool complete = true;
        std::vector<std::string> recipes;
        for (const Merged& one : all) {
            complete = complete && one.matrix.complete();
            recipes.push_back(one.recipe);
        }
        file.attribute("", "complete", std::int64_t{complete ? 1 : 0});
        file.attribute("", "sigma_ratio", all.front().matrix.config.rule.sigma_ratio);
        file.attribute("", "loss_ratio", all.front().matrix.config.rule.loss_ratio);
        file.attribute("", "recipes", recipes);
        for (const Merged& one : all)
            faultline::write(one.matrix, file, "runs", fmt::format("recipes/{}/", one.recipe));
    }
    write_steps(all, file, folder);
}

std::string table(const std::vector<Merged>& all) {
    std::string out;
    for (const Merged& one : all) {
        if (!one.recipe.empty()) out += fmt::format("{}recipe {}\n", out.empty() ? "" : "\n", one.recipe);
        out += faultline::table(one.matrix);
    }
    return out;
}

std::string to_json(const std::vector<Merged>& all) {
    using nlohmann::ordered_json;
    ordered_json recipes = ordered_json::array();
    bool complete = true;
    for (const Merged& one : all) {
        complete = complete && one.matrix.complete();
        ordered_json object{{"recipe", one.recipe}};
        object.update(ordered_json::parse(faultline::to_json(one.matrix)));
        recipes.push_back(std::move(object));
    }
    const ordered_json object{{"schema", "faultline.sweep/1"}, {"complete", complete}, {"recipes", std::move(recipes)}};
    return object.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace faultline::sweep
