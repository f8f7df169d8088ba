// SPDX-License-Identifier: Apache-2.0
// The runs of a sweep as Slurm's job arrays (slurm.schedmd.com/job_array.html), a task each.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <faultline/sweep/cell.hpp>

namespace faultline::sweep {

struct Slurm {
    std::vector<std::string> program;   ///< to which the file of a run's settings is added, by absolute path
    std::string name;                   ///< of the job
    std::string partition, gres, time;  ///< as sbatch has them; empty: the cluster's
    std::vector<std::string> lines;     ///< further options of sbatch: "--account=x"
    int cpus = 1;                       ///< of a task
    int at_once = 0;                    ///< tasks; 0: as many as Slurm lets
};

/// One array, as many tasks as a cluster takes by default (MaxArraySize, 1001, leaves indices to 1000).
struct SlurmScript {
    std::string path;   ///< in FOLDER/slurm/
    std::string array;  ///< "0-17%4"
};

/// Whether sbatch --time takes it (sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
/// days-hours:minutes:seconds; slurm's time_str2secs also INFINITE and UNLIMITED).
[[nodiscard]] bool is_time_limit(std::string_view text);
/// The name of a sweep's jobs, by which squeue tells them from another's: its folder's, without ".sweep". At most 60 characters:
/// letters, digits, '.', '_' and '-'.
[[nodiscard]] std::string job_name(const std::string& folder);
/// The words as a shell reads them, quoted where they have to be.
[[nodiscard]] std::string shell(const std::vector<std::string>& words);

/// Writes FOLDER/slurm/arrayN.sh for the cells, and merge.sh, which merges them. WorkError when the disk refuses.
[[nodiscard]] std::vector<SlurmScript> write_scripts(const std::string& folder, const std::vector<Cell>& cells,
                                                     const Slurm& slurm, const std::vector<std::string>& merge);
/// Submits the arrays, and the merge for when all of them have ended; the numbers of the jobs, the merge's last. WorkError with
/// what sbatch said.
[[nodiscard]] std::vector<std::string> submit(const std::string& folder, const std::vector<SlurmScript>& scripts);

}  // namespace faultline::sweep
