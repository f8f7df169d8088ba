// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/train_settings.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/without_effect.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

namespace faultline::cli {
namespace {

constexpr std::int64_t most = 1 << 20;  // of a size or a count: far beyond any model that a CPU trains

template <class T, std::size_t N>
T chosen(const std::string& name, const char* key, const Settings& settings,
         const std::array<std::pair<std::string_view, T>, N>& known) {
    std::vector<std::string_view> names;
    for (const auto& [known_name, value] : known) {
        if (known_name == name) return value;
        names.push_back(known_name);
    }
    throw RequestError(fmt::format("{}: {}: {}", settings.where(key), in_quotes(name), expected_one_of(name, names)));
}

std::shared_ptr<const RoundingPlan> attention_plan(const std::string& name, const char* key, const TrainSettings& own,
                                                   const Settings& settings) {
    if (name == "fast") return nullptr;
    if (name == "tensor") {
        const std::int64_t head_dim = own.heads > 0 ? own.width / own.heads : 0;
        if (head_dim != 64 && head_dim != 128)
            throw RequestError(fmt::format("{}: tensor: heads have {} columns: expected 64 or 128, or fast",
                                           settings.where(key), head_dim));
        RoundingPlan own_plan = tensor_kernel::backward_plan(static_cast<int>(head_dim));
        own_plan.name = "tensor";
        return std::make_shared<const RoundingPlan>(std::move(own_plan));
    }
    try {
        return std::make_shared<const RoundingPlan>(plan(name));
    } catch (const RequestError& error) {
        throw RequestError(
            fmt::format("{}: {}; or fast, the trainer's own kernel; or tensor", settings.where(key), error.what()));
    }
}

int small_number(std::string_view text) {
    int value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

/// "1=fa2": layer 1; "1/0,3=fa2": heads 0 and 3 of layer 1.
gpt::AttentionChoice layer_choice(const std::string& text, const TrainSettings& own, const Settings& settings) {
    const auto refuse = [&] {
        throw RequestError(fmt::format("{}: {}: expected LAYER=PLAN or LAYER/HEAD,HEAD=PLAN",
                                       settings.where("layer-attention"), in_quotes(text)));
    };
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) refuse();
    std::string_view place = std::string_view(text).substr(0, equals);
    gpt::AttentionChoice choice;
    const std::size_t slash = place.find('/');
    choice.layer = small_number(place.substr(0, slash));
    if (choice.layer < 0) refuse();
    if (slash != std::string_view::npos) {
        place.remove_prefix(slash + 1);
        while (true) {
            const std::size_t comma = place.find(',');
            const int head = small_number(place.substr(0, comma));
            if (head < 0) refuse();
            if (std::ranges::find(choice.heads, head) != choice.heads.end())
                throw RequestError(fmt::format("{}: {}: head {}: is there twice: expected it once",
                                               settings.where("layer-attention"), in_quotes(text), head));
            choice.heads.push_back(head);
            if (comma == std::string_view::npos) break;
            place.remove_prefix(comma + 1);
        }
    }
    choice.plan = attention_plan(text.substr(equals + 1), "layer-attention", own, settings);
    return choice;
}

void set_if(const std::optional<double>& given, double& target) {
    if (given) target = *given;
}

gpt::ModelConfig model_config(const TrainSettings& own, const Settings& settings, const TrainData& data) {
    using gpt::NormStatistics;
    using gpt::QkNorm;
    gpt::ModelConfig m;
    m.layers = static_cast<int>(own.layers);
    m.width = static_cast<int>(own.width);
    m.heads = static_cast<int>(own.heads);
    m.context = static_cast<int>(own.context);
    // Ids of a tokenizer are padded to a multiple of 64, as nanoGPT does: 50257 to 50304.
    m.vocabulary = own.vocab > 0 ? static_cast<int>(own.vocab) : (data.tokens.vocabulary + 63) / 64 * 64;
    m.bias = own.bias;
    m.sigma_reparam = own.sigma_reparam;
    m.output_gate = own.output_gate;
    set_if(own.softcap, m.softcap);
    set_if(own.z_loss, m.z_loss);
    m.bf16 = chosen<bool, 2>(own.precision, "precision", settings, {{{"bf16", true}, {"fp32", false}}});
    m.qk_norm = chosen<QkNorm, 3>(
        own.qk_norm, "qk-norm", settings,
        {{{"none", QkNorm::none}, {"parameter-free", QkNorm::parameter_free}, {"learned", QkNorm::learned}}});
    m.norm_statistics = chosen<NormStatistics, 4>(own.norm_statistics, "norm-statistics", settings,
                                                  {{{"fp32", NormStatistics::fp32},
                                                    {"bf16", NormStatistics::bf16},
                                                    {"bf16-forward", NormStatistics::bf16_forward},
                                                    {"bf16-backward", NormStatistics::bf16_backward}}});
    if (auto all = attention_plan(own.attention, "attention", own, settings))
        m.attention.push_back({-1, {}, std::move(all)});
    for (const std::string& text : own.layer_attention) m.attention.push_back(layer_choice(text, own, settings));
    return m;
}

}  // namespace

void TrainSettings::declare(Settings& s) {
    s.text("data", data, "FILE|FOLDER",
           "Text (bytes), llm.c shards or nanoGPT's train.bin; default: the manual of the Debian package perl-doc");
    s.text("data-format", data_format, "FORMAT", "auto, text, llmc or nanogpt");
    s.text("replay", replay, "FILE|FOLDER",
           "Offsets of the windows, a line a step; or a folder of generated_indices_rank_R.txt");
    s.integer("layers", layers, 1, "N", "Layers", most);
    s.integer("width", width, 1, "N", "Width of the residual stream", most);
    s.integer("heads", heads, 1, "N", "Heads of a layer", most);
    s.integer("context", context, 1, "N", "Tokens of a sequence", most);
    s.integer("vocab", vocab, 0, "N", "Vocabulary; 0: 256 for bytes, the tokenizer's for shards", 1 << 30);
    s.flag("bias", bias, "Linear layers and norms have biases");
    s.text("precision", precision, "bf16|fp32", "bf16: products as bf16 autocast makes them; weights stay fp32");
    s.text("norm-statistics", norm_statistics, "WHERE",
           "Mean and 1/sigma of the layer norms in bf16: fp32 (nowhere), bf16, bf16-forward, bf16-backward");
    s.text("attention", attention, "fast|tensor|PLAN|FILE.toml",
           "The attention kernel; tensor: the tensor cores' plan; on the CPU a plan's is emulated and slower");
    s.items("layer-attention", layer_attention, "LAYER[/HEADS]=PLAN",
            "Another one in a layer, or in some of its heads");
    s.text("qk-norm", qk_norm, "NORM", "none, parameter-free or learned");
    s.number("softcap", softcap, "C", "Scores s become C tanh(s/C); 0: none");
    s.flag("sigma-reparam", sigma_reparam, "Linear layers use gamma W / sigma_max(W)");
    s.flag("output-gate", output_gate, "Attention output times a sigmoid gate");
    s.number("z-loss", z_loss, "X", "Coefficient of log-sum-exp^2 of the logits; 0: none");
    s.number("qk-clip", qk_clip, "TAU", "W_Q and W_K of a head shrink where its largest logit passes TAU; 0: never");
    s.text("optimizer", optimizer, "NAME", "adamw, muon or sgd");
    s.positive_number("lr", learning_rate, "X", "Learning rate after warm-up");
    s.integer("warmup", warmup, 0, "STEPS", "Linear warm-up");
    s.text("schedule", schedule, "constant|cosine", "The learning rate after warm-up");
    s.number("final-lr", final_learning_rate, "X", "Where the cosine ends");
    s.number("beta1", beta1, "X", "AdamW");
    s.number("beta2", beta2, "X", "AdamW");
    s.positive_number("epsilon", epsilon, "X", "AdamW");
    s.number("weight-decay", weight_decay, "X", "Decoupled, of matrices");
    s.number("momentum", momentum, "X", "SGD (default 0.9) and Muon (0.95)");
    s.number("clip", clip, "X", "Largest norm of the gradient; 0: no clipping");
    s.integer("steps", steps, 1, "N", "Steps");
    s.integer("batch", batch, 1, "N", "Sequences of a micro-batch", most);
    s.integer("accumulate", accumulate, 1, "N", "Micro-batches of a step", most);
    s.integer("seed", seed, 0, "N", "Of weights and windows");
    s.integer("monitor-every", monitor_every, 0, "N", "Steps between spectra and entropies; 0: never", most);
    s.integer("validate-every", validate_every, 0, "N", "Steps between validations; 0: never", most);
    s.integer("validation-batches", validation_batches, 1, "N", "Batches of a validation", most);
}

std::vector<InputHash> TrainData::inputs() const {
    std::vector<InputHash> all = tokens.inputs;
    all.insert(all.end(), windows.inputs().begin(), windows.inputs().end());
    return all;
}

TrainData read_data(const TrainSettings& own, const Settings& settings) {
    using gpt::DataFormat;
    const DataFormat format = chosen<DataFormat, 4>(own.data_format, "data-format", settings,
                                                    {{{"auto", DataFormat::automatic},
                                                      {"text", DataFormat::text},
                                                      {"llmc", DataFormat::llmc},
                                                      {"nanogpt", DataFormat::nanogpt}}});
    return {own.data.empty() ? gpt::default_tokens() : gpt::read_tokens(own.data, format),
            own.replay.empty() ? gpt::WindowOrder(static_cast<std::uint64_t>(own.seed))
                               : gpt::WindowOrder::replay(own.replay)};
}

namespace {

/// check(), whose sentences begin with the field: where the field's value came from in its place.
template <class Config>
void check_as_given(const Config& config, const TrainSettings& own, const Settings& settings) {
    try {
        gpt::check(config);
    } catch (const RequestError& error) {
        const std::string_view said = error.what();
        const std::string_view field = said.substr(0, said.find(':'));
        // A plan for all layers is in range: it is one of --layer-attention's that is not.
        const std::string_view key = field == "attention" && !own.layer_attention.empty() ? "layer-attention" : field;
        throw RequestError(settings.where(key) + std::string(said.substr(field.size())));
    }
}

/// A choice of attention that says what holds anyway, or that the others overrule.
void expect_choices_met(const gpt::ModelConfig& model, const TrainSettings& own, const Settings& settings) {
    const auto idle = gpt::choice_without_effect(model);
    if (!idle) return;
    const std::size_t for_all = model.attention.size() - own.layer_attention.size();  // 1 with --attention of a plan
    const bool layers = *idle >= for_all;
    throw RequestError(
        fmt::format("{}: {}: does nothing: every head would run the same plan without it: expected none, or another",
                    settings.where(layers ? "layer-attention" : "attention"),
                    in_quotes(layers ? own.layer_attention[*idle - for_all] : own.attention)));
}

/// Settings of a file may be meant for runs of another length than the command line's.
void expect_cosine_met(const gpt::TrainConfig& config, const Settings& settings) {
    if (!config.schedule.cosine || gpt::cosine_falls(config.schedule, config.steps)) return;
    const auto given = [&](const char* key) { return settings.given(key); };
    const bool asked = given("schedule") || given("final-lr") ||
                       (settings.in_file("schedule") && !given("steps") && !given("warmup") && !given("lr"));
    if (!asked) return;
    if (config.schedule.final_rate == config.schedule.learning_rate)
        throw RequestError(
            fmt::format("{}: {}: does nothing: is the learning rate, which the cosine would fall from: "
                        "expected another, or --schedule constant",
                        settings.where("final-lr"), config.schedule.final_rate));
    throw RequestError(fmt::format(
        "{}: cosine: does nothing: the warm-up leaves {} of {} steps, and the rate falls from the second of them on: "
        "expected a shorter warmup, more steps, or the schedule constant",
        settings.where("schedule"), std::max<std::int64_t>(0, config.steps - config.schedule.warmup), config.steps));
}

}  // namespace

std::vector<std::pair<std::string_view, std::string_view>> unread_settings(const TrainSettings& own) {
    std::vector<std::pair<std::string_view, std::string_view>> unread;
    if (own.data.empty()) unread.emplace_back("data-format", "without data");
    if (own.schedule == "constant") unread.emplace_back("final-lr", "with schedule constant");
    if (own.optimizer == "adamw") unread.emplace_back("momentum", "with optimizer adamw");
    if (own.optimizer == "sgd")
        for (const char* key : {"beta1", "beta2", "epsilon"}) unread.emplace_back(key, "with optimizer sgd");
    return unread;
}

gpt::TrainConfig train_config(const TrainSettings& own, const Settings& settings, const TrainData& data, int threads) {
    using gpt::OptimizerKind;
    for (const auto& [key, without] : unread_settings(own)) settings.refuse_unread({key}, without);
    gpt::TrainConfig c;
    c.model = model_config(own, settings, data);
    c.optimizer.kind = chosen<OptimizerKind, 3>(
        own.optimizer, "optimizer", settings,
        {{{"adamw", OptimizerKind::adamw}, {"muon", OptimizerKind::muon}, {"sgd", OptimizerKind::sgd}}});
    if (c.optimizer.kind == OptimizerKind::muon) c.optimizer.momentum = 0.95;
    set_if(own.beta1, c.optimizer.beta1);
    set_if(own.beta2, c.optimizer.beta2);
    set_if(own.epsilon, c.optimizer.epsilon);
    set_if(own.weight_decay, c.optimizer.weight_decay);
    set_if(own.momentum, c.optimizer.momentum);
    set_if(own.learning_rate, c.schedule.learning_rate);
    set_if(own.final_learning_rate, c.schedule.final_rate);
    c.schedule.warmup = own.warmup;
    c.schedule.cosine = chosen<bool, 2>(own.schedule, "schedule", settings, {{{"constant", false}, {"cosine", true}}});
    set_if(own.clip, c.clip);
    set_if(own.qk_clip, c.qk_clip);
    c.steps = own.steps;
    c.batch = static_cast<int>(own.batch);
    c.accumulate = static_cast<int>(own.accumulate);
    c.seed = static_cast<std::uint64_t>(own.seed);
    c.monitor_every = static_cast<int>(own.monitor_every);
    c.validate_every = static_cast<int>(own.validate_every);
    c.validation_batches = static_cast<int>(own.validation_batches);
    c.threads = threads;
    check_as_given(c.model, own, settings);
    check_as_given(c, own, settings);
    expect_choices_met(c.model, own, settings);
    expect_cosine_met(c, settings);
    return c;
}

}  // namespace faultline::cli
