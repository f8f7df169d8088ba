// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/fingerprint.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/gpt/trainer.hpp>
#include <faultline/plan/plan_toml.hpp>

namespace faultline::gpt {

std::vector<std::pair<std::string, std::string>> fingerprint(const TrainConfig& c) {
    std::vector<std::pair<std::string, std::string>> all;
    const auto put = [&](const char* key, const auto& value) { all.emplace_back(key, fmt::format("{}", value)); };
    const ModelConfig& m = c.model;
    put("layers", m.layers);
    put("width", m.width);
    put("heads", m.heads);
    put("context", m.context);
    put("vocab", m.vocabulary);
    put("bias", m.bias);
    put("norm-epsilon", m.norm_epsilon);
    if (m.norm_statistics != NormStatistics::fp32) put("norm-statistics", static_cast<int>(m.norm_statistics));
    put("bf16", m.bf16);
    put("qk-norm", static_cast<int>(m.qk_norm));
    put("softcap", m.softcap);
    put("sigma-reparam", m.sigma_reparam);
    put("output-gate", m.output_gate);
    put("z-loss", m.z_loss);
    for (std::size_t i = 0; i < m.attention.size(); ++i) {
        const AttentionChoice& choice = m.attention[i];
        put("attention", fmt::format("{}: layer {} heads {} {}", i, choice.layer, choice.heads,
                                     choice.plan == nullptr ? std::string("fast") : to_toml(*choice.plan)));
        all.back().first += std::to_string(i);
    }
    const OptimizerConfig& o = c.optimizer;
    put("optimizer", static_cast<int>(o.kind));
    put("beta1", o.beta1);
    put("beta2", o.beta2);
    put("epsilon", o.epsilon);
    put("weight-decay", o.weight_decay);
    put("momentum", o.momentum);
    put("nesterov", o.nesterov);
    put("newton-schulz-steps", o.newton_schulz_steps);
    put("adamw-rate", o.adamw_rate);
    const ScheduleConfig& s = c.schedule;
    put("lr", s.learning_rate);
    put("warmup", s.warmup);
    put("cosine", s.cosine);
    put("final-lr", s.final_rate);
    if (s.cosine) put("steps", c.steps);
    put("batch", c.batch);
    put("accumulate", c.accumulate);
    put("clip", c.clip);
    put("qk-clip", c.qk_clip);
    put("seed", c.seed);
    put("monitor-every", c.monitor_every);
    put("validate-every", c.validate_every);
    put("validation-batches", c.validation_batches);
    all.insert(all.end(), c.also.begin(), c.also.end());
    return all;
}

}  // namespace faultline::gpt
