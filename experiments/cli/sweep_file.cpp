// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/sweep_file.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/device_trainers.hpp>
#include <faultline/cli/setting.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/cli/train_settings.hpp>
#include <faultline/dissociation/matrix_words.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/tomlplusplus.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

namespace fs = std::filesystem;

toml::table parse_file(const std::string& path) {
    const std::string file = escaped(path, path.size());
    constexpr std::uint64_t largest = 1 << 20;  // a sweep is a page of text
    const FileInput in(path);
    if (in.size() > largest)
        throw RequestError(fmt::format("{}: has {} bytes: expected the TOML of a sweep", in.name(), in.size()));
    std::string text(in.size(), '\0');
    in.read(0, std::as_writable_bytes(std::span(text)));
    try {
        return toml::parse(text, path);
    } catch (const toml::parse_error& error) {
        throw RequestError(fmt::format("{}: line {}: {}: expected TOML", file, error.source().begin.line,
                                       escaped(error.description())));
    }
}

const toml::table& table_of(const toml::table& root, const char* name, const std::string& file) {
    static const toml::table none;
    const toml::node* node = root.get(name);
    if (node == nullptr) return none;
    if (!node->is_table()) throw RequestError(fmt::format("{}: {}: expected a table", file, name));
    return *node->as_table();
}

void expect_tables(const toml::table& root, const std::vector<std::string_view>& known, const std::string& file) {
    for (const auto& [name, node] : root)
        if (std::ranges::find(known, name.str()) == known.end())
            throw RequestError(fmt::format("{}: line {}: {}: {}", file, node.source().begin.line, in_quotes(name.str()),
                                           expected_one_of(name.str(), known)));
}

/// [matrix].
struct Crossed {
    std::vector<std::string> sources, sites, laws, interventions{"none"}, controls;
    std::vector<double> magnitudes;
    std::vector<int> seeds{0};
    std::optional<double> sigma_ratio, loss_ratio;
    std::int64_t checkpoint_every = default_checkpoint_every;

    void declare(Settings& s) {
        s.items("source", sources, "", "");
        s.list("site", sites, "", "");
        s.items("law", laws, "", "");
        s.list("magnitude", magnitudes, "", "");
        s.items("intervention", interventions, "", "");
        s.items("control", controls, "", "");
        s.list("seeds", seeds, "", "");
        s.positive_number("sigma-ratio", sigma_ratio, "", "");
        s.positive_number("loss-ratio", loss_ratio, "", "");
        s.integer("checkpoint-every", checkpoint_every, 1, "", "", 1 << 30);
    }

    /// The sources named, then sites x laws x magnitudes.
    [[nodiscard]] std::vector<std::string> all_sources(const std::string& file) const {
        std::vector<std::string> all = sources;
        const std::array<std::pair<const char*, bool>, 3> parts{
            {{"site", sites.empty()}, {"law", laws.empty()}, {"magnitude", magnitudes.empty()}}};
        const auto missing = std::ranges::count_if(parts, [](const auto& part) { return part.second; });
        for (const auto& [key, is_missing] : parts)
            if (is_missing && missing < 3)
                throw RequestError(
                    fmt::format("{}: matrix.{}: is missing or empty: expected it beside the others of site, "
                                "law and magnitude, which make sources together",
                                file, key));
        if (all.empty() && missing == 3)
            throw RequestError(fmt::format(
                "{}: matrix.source: is missing or empty: expected sources, or site, law and magnitude", file));
        for (const std::string& site : sites)
            for (const std::string& law : laws)
                for (const double magnitude : magnitudes) all.push_back(fmt::format("{}:{}:{}", site, law, magnitude));
        return all;
    }
};

/// A setting of a recipe that is not the sweep's: key, value, and where it stands.
struct Change {
    std::string_view key;
    const toml::node* value;
    std::string where;
};
struct Variant {
    std::string name;
    std::vector<Change> changes;
};

std::string text_of(const toml::node& node) {
    if (const auto text = node.value<std::string>(); text && node.is_string()) return *text;
    if (const auto real = node.value<double>(); real && node.is_floating_point()) return fmt::format("{}", *real);
    if (const auto whole = node.value<std::int64_t>(); whole && node.is_integer()) return fmt::format("{}", *whole);
    if (const toml::array* items = node.as_array()) {
        std::string out;
        for (const toml::node& item : *items) {
            if (!out.empty()) out += '+';
            out += text_of(item);
        }
        return out;
    }
    return node.value<bool>().value_or(false) ? "true" : "false";
}

/// [[recipe]]: named sets of settings; without any, one that changes nothing.
std::vector<Variant> recipes_of(const toml::table& root, const std::string& file) {
    const toml::node* node = root.get("recipe");
    if (node == nullptr) return {Variant{}};
    const toml::array* list = node->as_array();
    if (list == nullptr || list->empty())
        throw RequestError(fmt::format("{}: recipe: expected tables [[recipe]], each with a name", file));
    std::vector<Variant> all;
    for (const toml::node& item : *list) {
        const toml::table* table = item.as_table();
        const toml::node* name = table == nullptr ? nullptr : table->get("name");
        if (name == nullptr || !name->is_string() || name->value<std::string>()->empty())
            throw RequestError(
                fmt::format("{}: recipe: number {}: has no name: expected name = \"…\" in each", file, all.size() + 1));
        Variant variant{*name->value<std::string>(), {}};
        if (variant.name.find('/') != std::string::npos || variant.name == ".")  // a group of the merged file
            throw RequestError(
                fmt::format("{}: recipe: name: {}: expected a name without /, which names groups in the "
                            "merged file",
                            file, in_quotes(variant.name)));
        for (const auto& [key, value] : *table)
            if (key.str() != "name")
                variant.changes.push_back(
                    {key.str(), &value, fmt::format("{}: recipe {}", file, in_quotes(variant.name))});
        all.push_back(std::move(variant));
    }
    return all;
}

/// Every combination with the values of [vary].
std::vector<Variant> varied(std::vector<Variant> variants, const toml::table& vary, const std::string& file) {
    for (const auto& [key, values] : vary) {
        const toml::array* list = values.as_array();
        if (list == nullptr || list->empty())
            throw RequestError(
                fmt::format("{}: vary.{}: expected a list of the values it takes", file, escaped(key.str())));
        std::vector<Variant> next;
        for (const Variant& variant : variants)
            for (const toml::node& value : *list) {
                Variant one = variant;
                std::string text = text_of(value);
                std::ranges::replace(text, '/', '_');  // of a plan's path: the name is a group of the merged file
                one.name += fmt::format("{}{}={}", one.name.empty() ? "" : ",", key.str(), text);
                one.changes.push_back({key.str(), &value, fmt::format("{}: vary", file)});
                next.push_back(std::move(one));
            }
        variants = std::move(next);
    }
    return variants;
}

/// RequestError where the file makes more runs than a sweep has, before any is made: each is some files of a folder and some kilobytes
/// of memory here. A few of them may be the same, controls that are sources too.
void expect_so_many(double recipes, const Crossed& crossed, std::size_t sources, std::size_t controls,
                    const std::string& file) {
    const double runs = recipes * static_cast<double>(crossed.seeds.size()) *
                        (1 + static_cast<double>(controls) +
                         static_cast<double>(sources) * static_cast<double>(crossed.interventions.size()));
    if (runs <= most_runs_of_a_sweep) return;
    throw RequestError(
        fmt::format("{}: matrix and vary: make some {:.{}g} runs: expected at most {}, or several sweeps", file, runs,
                    runs < 1e6 ? 6 : 2, most_runs_of_a_sweep));
}

/// Variants that recipes_of() and varied() make.
double count_of_variants(std::size_t recipes, const toml::table& vary) {
    auto count = static_cast<double>(recipes);
    for (const auto& [key, values] : vary)
        if (const toml::array* list = values.as_array(); list != nullptr && !list->empty())
            count *= static_cast<double>(list->size());
    return count;
}

using DataCache = std::map<std::pair<std::string, std::string>, std::shared_ptr<const gpt::TokenData>>;

/// Files are named from the folder that the sweep's stands in.
std::string from_folder(const std::string& folder, const std::string& name) {
    return (fs::path(folder) / name).lexically_normal().string();
}

/// The same of a plan, where it is a file and not a preset.
std::string plan_from_folder(const std::string& folder, const std::string& name) {
    return name.ends_with(".toml") ? from_folder(folder, name) : name;
}

std::string folder_of(const std::string& path) { return fs::absolute(path).parent_path().string(); }

void name_files(const std::string& folder, TrainSettings& own) {
    if (!own.data.empty()) own.data = from_folder(folder, own.data);
    own.attention = plan_from_folder(folder, own.attention);
    for (std::string& choice : own.layer_attention)
        if (const std::size_t equals = choice.find('='); equals != std::string::npos)
            choice = choice.substr(0, equals + 1) + plan_from_folder(folder, choice.substr(equals + 1));
}

/// What faultline train takes besides a recipe, and what is expected for it in a sweep.
constexpr std::array<std::pair<std::string_view, std::string_view>, 13> no_recipe{{
    {"threads", "is no run's own: expected threads in [sweep], or --threads"},
    {"inject", "is a source: expected it in matrix.source"},
    {"checkpoint-every", "is the sweep's: expected matrix.checkpoint-every"},
    {"output", "is the sweep's: expected -o FOLDER"},
    {"resume", "is what the sweep does: expected none"},
    {"capture", "is of faultline train alone: expected none"},
    {"capture-sequences", "is of faultline train alone: expected none"},
    {"ranks", "is of faultline train alone: expected none, a run of a sweep is one process"},
    {"reduce", "is of faultline train alone: expected none, a run of a sweep is one process"},
    {"overlap", "is of faultline train alone: expected none, a run of a sweep is one process"},
    {"deterministic", "is of faultline train alone: expected none"},
    {"monitors", "is of faultline train alone: expected none"},
    {"force", "is no run's: expected a run's record removed, which makes it anew"},
}};

void expect_of_recipe(std::string_view key, const std::string& where) {
    for (const auto& [other, expected] : no_recipe)
        if (key == other) throw RequestError(fmt::format("{}.{}: {}", where, key, expected));
}

/// The settings of a recipe, and its data from what has been read already.
SweepRecipe recipe_of(const Variant& variant, const toml::table& train, const std::string& path,
                      const std::string& folder, DataCache& cache) {
    const std::string file = escaped(path, path.size());
    Settings settings("train");
    TrainSettings own;
    own.validate_every = 0;  // as faultline dissociate: at the end alone
    std::string device = "cpu";
    own.declare(settings);
    settings.text("device", device, "", "");
    for (const auto& [key, value] : train) expect_of_recipe(key.str(), fmt::format("{}: train", file));
    settings.read(Settings::Table{train}, fmt::format("{}: train", file));
    for (const Change& change : variant.changes) {
        expect_of_recipe(change.key, change.where);
        settings.read(Settings::Value{change.key, *change.value}, change.where);
    }
    for (const auto& [key, without] : unread_settings(own))
        if (const auto change = std::ranges::find(variant.changes, key, &Change::key); change != variant.changes.end())
            throw RequestError(fmt::format("{}.{}: means nothing {}: expected none", change->where, key, without));
    const auto refuse = [&](const char* key, const char* expected) {
        throw RequestError(fmt::format("{}: {}", settings.where(key), expected));
    };
    if (!settings.where("seed").starts_with("--")) refuse("seed", "is of one run: expected seeds in [matrix]");
    if (!own.replay.empty()) refuse("replay", "every seed has windows of its own: expected none");
    if (own.monitor_every == 0) refuse("monitor-every", "0: the verdict needs sigma_max(W_Q): expected 1 or more");
    if (device != "cpu" && device != "cuda") refuse("device", "expected \"cpu\" or \"cuda\"");
    name_files(folder, own);
    std::shared_ptr<const gpt::TokenData>& data = cache[{own.data, own.data_format}];
    TrainData read;
    if (data == nullptr) {
        try {
            read = read_data(own, settings);
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: {}", settings.where("data"), error.what()));
        }
        data = std::make_shared<const gpt::TokenData>(std::move(read.tokens));
    }
    read.tokens = {};
    read.tokens.vocabulary = data->vocabulary;  // all that a configuration needs of it
    SweepRecipe recipe;
    recipe.name = variant.name;
    static const DeviceTrainers on_a_card;
    if (device == "cuda") recipe.config.trainers = &on_a_card;
    recipe.config.train = train_config(own, settings, read, 1);
    recipe.data = data;
    recipe.settings = settings.print();
    return recipe;
}

template <class Check>
void check_words(const std::string& where, Check&& check) {
    try {
        check();
    } catch (const RequestError& error) {
        throw RequestError(fmt::format("{}: {}", where, error.what()));
    }
}

}  // namespace

SweepFile read_sweep(const std::string& path, const std::string& folder) {
    const std::string from = folder.empty() ? folder_of(path) : folder;
    const std::string file = escaped(path, path.size());
    const toml::table root = parse_file(path);
    expect_tables(root, {"matrix", "train", "recipe", "vary", "sweep"}, file);
    if (!root.contains("matrix"))
        throw RequestError(fmt::format("{}: has no table [matrix]: expected what is to be crossed", file));
    Crossed crossed;
    Settings settings("matrix");
    crossed.declare(settings);
    settings.read(Settings::Table{table_of(root, "matrix", file)}, fmt::format("{}: matrix", file));
    const std::vector<std::string> sources = crossed.all_sources(file);
    for (const auto& [key, empty] :
         {std::pair("seeds", crossed.seeds.empty()), {"intervention", crossed.interventions.empty()}})
        if (empty) throw RequestError(fmt::format("{}: matrix.{}: is empty: expected one or more", file, key));
    const auto in_matrix = [&](const char* key) { return fmt::format("{}: matrix.{}", file, key); };
    check_words(in_matrix("intervention"), [&] { expect_different_interventions(crossed.interventions); });
    check_words(in_matrix("control"), [&] {
        expect_different_interventions(crossed.controls);
        expect_controls_met(crossed.controls);
    });
    const std::vector<std::string> controls =
        crossed.controls.empty() ? default_controls(crossed.interventions) : crossed.controls;

    SweepFile out;
    out.checkpoint_every = crossed.checkpoint_every;
    DataCache cache;
    std::set<std::string> names;
    const std::vector<Variant> named = recipes_of(root, file);
    const toml::table& vary = table_of(root, "vary", file);
    expect_so_many(count_of_variants(named.size(), vary), crossed, sources.size(), controls.size(), file);
    for (const Variant& variant : varied(named, vary, file)) {
        end_if_interrupted();
        if (!names.insert(variant.name).second)
            throw RequestError(
                fmt::format("{}: recipe {}: is there twice: expected different names", file, in_quotes(variant.name)));
        SweepRecipe recipe = recipe_of(variant, table_of(root, "train", file), path, from, cache);
        recipe.config.sources = sources;
        recipe.config.folder = from;
        recipe.config.interventions = crossed.interventions;
        recipe.config.controls = controls;
        recipe.config.seeds.assign(crossed.seeds.begin(), crossed.seeds.end());
        if (crossed.sigma_ratio) recipe.config.rule.sigma_ratio = *crossed.sigma_ratio;
        if (crossed.loss_ratio) recipe.config.rule.loss_ratio = *crossed.loss_ratio;
        const int head_dim = recipe.config.train.model.head_dim();
        check_words(in_matrix("source"), [&] {
            expect_different_sources(sources, recipe.config.train, from);
            expect_magnitudes_met(sources, recipe.config.train, from);
        });
        check_words(in_matrix("intervention"),
                    [&] { expect_interventions_met(sources, crossed.interventions, controls, head_dim, from); });
        out.recipes.push_back(std::move(recipe));
    }
    return out;
}

std::vector<sweep::Cell> cells_of(const SweepFile& file, const std::string& path) {
    std::vector<sweep::Cell> cells;
    std::map<std::string, std::string> recipes;  // by key
    for (const SweepRecipe& recipe : file.recipes) {
        const std::string where =
            recipe.name.empty() ? escaped(path, path.size())
                                : fmt::format("{}: recipe {}", escaped(path, path.size()), in_quotes(recipe.name));
        for (const RunPlan& plan : runs_of(recipe.config)) {
            end_if_interrupted();
            sweep::Cell cell{recipe.name, plan.source, plan.intervention, plan.seed, recipe.config.train.steps, "", ""};
            try {
                cell.key = sweep::key_of(identity_of(recipe.config, plan, *recipe.data));
            } catch (const RequestError& error) {
                throw RequestError(fmt::format("{}: {}", where, error.what()));
            }
            cell.name = sweep::name_of(cell);
            if (const auto [other, is_new] = recipes.try_emplace(cell.key, recipe.name); !is_new)
                throw RequestError(
                    fmt::format("{}: {}, {}, seed {}: is the run that recipe {} has: expected different runs", where,
                                plan.source, plan.intervention, plan.seed, in_quotes(other->second)));
            cells.push_back(std::move(cell));
        }
    }
    return cells;
}

std::string cell_toml(const SweepFile& file, const SweepRecipe& recipe, const sweep::Cell& cell) {
    Settings settings("cell");
    std::string source = cell.source, intervention = cell.intervention, folder = recipe.config.folder;
    auto seed = static_cast<std::int64_t>(cell.seed);
    std::int64_t checkpoint_every = file.checkpoint_every;
    settings.text("source", source, "", "");
    settings.text("intervention", intervention, "", "");
    settings.text("folder", folder, "", "");
    settings.integer("seed", seed, 0, "", "");
    settings.integer("checkpoint-every", checkpoint_every, 1, "", "");
    // The recipe's seed is the default's, and the run's own stands above.
    std::string train = recipe.settings;
    const std::size_t at = train.find("\nseed = ");
    if (at != std::string::npos) train.erase(at, train.find('\n', at + 1) - at);
    return "# One run of a sweep, written by faultline sweep, which reads it in the run's process.\n" +
           settings.print() + "\n" + train;
}

SweepCell read_cell(const std::string& path) {
    const std::string file = escaped(path, path.size());
    const toml::table root = parse_file(path);
    expect_tables(root, {"cell", "train"}, file);
    SweepCell cell;
    std::string source, intervention, folder;
    std::int64_t seed = 0;
    Settings settings("cell");
    settings.text("source", source, "", "");
    settings.text("intervention", intervention, "", "");
    settings.text("folder", folder, "", "");
    settings.integer("seed", seed, 0, "", "");
    settings.integer("checkpoint-every", cell.checkpoint_every, 1, "", "");
    settings.read(Settings::Table{table_of(root, "cell", file)}, fmt::format("{}: cell", file));
    if (source.empty() || intervention.empty())
        throw RequestError(fmt::format("{}: cell: has no source or no intervention: expected a run of a sweep", file));
    DataCache cache;
    cell.recipe = recipe_of(Variant{}, table_of(root, "train", file), path, folder_of(path), cache);
    cell.recipe.config.folder = folder;
    cell.plan = {source, intervention, static_cast<std::uint64_t>(seed)};
    return cell;
}

}  // namespace faultline::cli
