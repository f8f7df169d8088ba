// SPDX-License-Identifier: Apache-2.0
#include <faultline/sweep/slurm.hpp>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <span>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/sweep/child.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::sweep {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t largest_array = 1000;

void write_script(const std::string& path, const std::string& text) {
    PartialFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
    fs::permissions(path, fs::perms::owner_exec | fs::perms::group_exec, fs::perm_options::add);
}

std::string options_of(const Slurm& slurm, const std::string& name, const std::string& log, int cpus, bool with_card) {
    std::string out = fmt::format(
        "#SBATCH --job-name={}\n#SBATCH --output=\"{}\"\n#SBATCH --ntasks=1\n"
        "#SBATCH --cpus-per-task={}\n#SBATCH --open-mode=append\n",
        name, log, cpus);
    if (!slurm.partition.empty()) out += fmt::format("#SBATCH --partition={}\n", slurm.partition);
    if (with_card && !slurm.gres.empty()) out += fmt::format("#SBATCH --gres={}\n", slurm.gres);
    if (!slurm.time.empty()) out += fmt::format("#SBATCH --time={}\n", slurm.time);
    for (const std::string& line : slurm.lines) out += fmt::format("#SBATCH {}\n", line);
    return out;
}

}  // namespace

std::string shell(const std::vector<std::string>& words) {
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    return shell_line(static_cast<int>(argv.size()), argv.data());
}

std::string job_name(const std::string& folder) {
    constexpr std::size_t most = 60;
    fs::path whole = fs::absolute(folder).lexically_normal();
    if (!whole.has_filename()) whole = whole.parent_path();  // "sweeps/new/"
    const fs::path last = whole.filename();
    std::string name = (last.extension() == ".sweep" ? last.stem() : last).string().substr(0, most);
    for (char& c : name) {
        const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' || c == '-';
        if (!plain) c = '-';
    }
    // An option of sbatch would begin with "-"; the file system's root has no name.
    return name.empty() || name.front() == '-' ? "sweep" + name : name;
}

bool is_time_limit(std::string_view text) {
    if (text == "INFINITE" || text == "UNLIMITED") return true;
    const auto all_digits = [](std::string_view part) {
        return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    };
    if (const std::size_t dash = text.find('-'); dash != std::string_view::npos) {
        if (!all_digits(text.substr(0, dash))) return false;
        text.remove_prefix(dash + 1);
    }
    int parts = 1;
    for (std::size_t colon = text.find(':'); colon != std::string_view::npos; colon = text.find(':'), ++parts) {
        if (!all_digits(text.substr(0, colon))) return false;
        text.remove_prefix(colon + 1);
    }
    return parts <= 3 && all_digits(text);
}

std::vector<SlurmScript> write_scripts(const std::string& folder, const std::vector<Cell>& cells, const Slurm& slurm,
                                       const std::vector<std::string>& merge) {
    const fs::path at = fs::absolute(folder) / "slurm";
    fs::create_directories(at);
    std::vector<SlurmScript> scripts;
    for (std::size_t begin = 0; begin < cells.size(); begin += largest_array) {
        const std::size_t end = std::min(begin + largest_array, cells.size());
        std::string text = "#!/bin/bash\n# One array of a sweep's runs; written by faultline sweep.\n";
        text += options_of(slurm, slurm.name, (at / "%A_%a.log").string(), slurm.cpus, true);
        // A minute before its time is over a task is asked to save its state. B: the signal goes to this script, whose place
        // the program takes below.
        text += "#SBATCH --signal=B:TERM@60\n\nruns=(\n";
        for (std::size_t i = begin; i < end; ++i) text += cells[i].name + "\n";
        text += fmt::format(")\nrun=${{runs[$SLURM_ARRAY_TASK_ID]}}\nfolder={}\n",
                            shell({(fs::absolute(folder) / "runs").string()}));
        text += fmt::format("exec {} \"$folder/$run.toml\" >>\"$folder/$run.log\" 2>&1\n", shell(slurm.program));
        SlurmScript script;
        script.path = (at / fmt::format("array{}.sh", scripts.size())).string();
        script.array =
            fmt::format("0-{}{}", end - begin - 1, slurm.at_once > 0 ? fmt::format("%{}", slurm.at_once) : "");
        write_script(script.path, text);
        scripts.push_back(script);
    }
    write_script((at / "merge.sh").string(),
                 "#!/bin/bash\n# Merges what the arrays have made; written by faultline sweep.\n" +
                     options_of(slurm, slurm.name + "-merge", (at / "merge.log").string(), 1, false) +
                     fmt::format("\nexec {}\n", shell(merge)));
    return scripts;
}

std::vector<std::string> submit(const std::string& folder, const std::vector<SlurmScript>& scripts) {
    const fs::path at = fs::absolute(folder) / "slurm";
    std::vector<std::string> jobs;
    std::string after;
    const auto sbatch = [&](const std::vector<std::string>& options, const std::string& script) {
        std::vector<std::string> words{"sbatch", "--parsable"};
        words.insert(words.end(), options.begin(), options.end());
        words.push_back(script);
        const Said said = run_to_end(words);
        const std::string name = escaped(script, script.size());
        if (said.status == 127)
            throw WorkError(
                fmt::format("sbatch: is not there: expected Slurm's client programs; the script is {}", name));
        if (said.status != 0)
            throw WorkError(fmt::format("sbatch: refused {} ({}): expected a job that the cluster takes", name,
                                        escaped(said.err.substr(0, said.err.find('\n')))));
        // "123", or "123;cluster".
        jobs.push_back(said.out.substr(0, said.out.find_first_of(";\n")));
    };
    for (const SlurmScript& script : scripts) {
        sbatch({"--array=" + script.array}, script.path);
        after += ":" + jobs.back();
    }
    sbatch({"--dependency=afterany" + after}, (at / "merge.sh").string());
    return jobs;
}

}  // namespace faultline::sweep
