// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/report.hpp>

namespace faultline {

int Cell::runaways() const {
    int count = 0;
    for (const RunVerdict& v : verdicts) count += v.runaway ? 1 : 0;
    return count;
}

int Cell::losses() const {
    int count = 0;
    for (const RunVerdict& v : verdicts) count += v.loss ? 1 : 0;
    return count;
}

Spread Cell::over(double (*value)(const RunResult&)) const {
    std::vector<double> values;
    for (const RunResult* run : runs) values.push_back(value(*run));
    return spread(values);
}

std::vector<Cell> cells(const RunMatrix& matrix) {
    std::vector<Cell> all;
    const auto cell_of = [&](const RunResult& run) -> Cell& {
        for (Cell& cell : all)
            if (cell.source == run.source && cell.intervention == run.intervention) return cell;
        return all.emplace_back(Cell{run.source, run.intervention, {}, {}});
    };
    for (const RunResult& run : matrix.runs) {
        if (!run.finished) continue;
        const RunResult* control = control_of(run, matrix.runs);
        Cell& cell = cell_of(run);
        cell.runs.push_back(&run);
        cell.verdicts.push_back(judge(run, control != nullptr ? *control : run, matrix.config.rule));
    }
    return all;
}

}  // namespace faultline
