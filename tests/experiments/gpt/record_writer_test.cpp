// SPDX-License-Identifier: Apache-2.0
// Reports that a thread writes while their numbers are still being worked out.
#include <faultline/gpt/record_writer.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include <faultline/record/record_reader.hpp>

#include "../../lib/tensor/support.hpp"

namespace faultline::gpt {
namespace {

using test::Folder;

StepReport report(std::int64_t step) {
    StepReport r;
    r.step = step;
    r.loss = 0.5 * static_cast<double>(step);
    r.layers = r.heads = 1;
    r.sigma_q = r.sigma_k = {std::nan("")};
    r.singular_q = r.singular_k = r.singular_qk = {std::nan(""), std::nan(""), std::nan("")};
    r.qk_normed = {0};
    return r;
}

std::vector<double> series(const std::string& path, const std::string& name) {
    const Tensor tensor = RecordReader(path).read("steps/" + name);
    std::vector<double> values(tensor.bytes.size() / sizeof(double));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
}

/// Every third step's spectra come late, and the later ones sooner than the first.
TEST(RecordWriter, KeepsTheOrderOfStepsWhoseNumbersComeLate) {
    for (const bool meanwhile : {true, false}) {
        SCOPED_TRACE(meanwhile);
        const Folder folder;
        const std::string path = (folder.path() / "run.h5").string();
        RunRecord record = RunRecord::create(path, {});
        {
            RecordWriter writer(record, meanwhile);
            for (std::int64_t step = 0; step < 30; ++step) {
                StepReport r = report(step);
                if (step % 3 == 0)
                    r.finish = [step](StepReport& of) {
                        std::this_thread::sleep_for(std::chrono::milliseconds(step < 10 ? 20 : 1));
                        of.singular_q = {static_cast<double>(step), 0, 0};
                    };
                writer.write(r);
            }
            writer.drain();
        }
        record.close();
        const std::vector<double> losses = series(path, "loss"), sigma = series(path, "sigma_q");
        ASSERT_EQ(losses.size(), 30U);
        ASSERT_EQ(sigma.size(), 90U);
        for (std::size_t step = 0; step < losses.size(); ++step) {
            EXPECT_EQ(losses[step], 0.5 * static_cast<double>(step));
            if (step % 3 == 0)
                EXPECT_EQ(sigma[3 * step], static_cast<double>(step));
            else
                EXPECT_TRUE(std::isnan(sigma[3 * step]));
        }
    }
}

/// What fails is said by the next write or by drain(), and what came before it is in the file.
TEST(RecordWriter, SaysWhatFailedAndWritesNothingBehindIt) {
    const Folder folder;
    const std::string path = (folder.path() / "run.h5").string();
    RunRecord record = RunRecord::create(path, {});
    {
        RecordWriter writer(record, true);
        writer.write(report(0));
        StepReport bad = report(1);
        bad.finish = [](StepReport&) { throw std::runtime_error("no spectra"); };
        writer.write(bad);
        const auto go_on = [&] {
            for (std::int64_t step = 2; step < 5; ++step) writer.write(report(step));
            writer.drain();
        };
        EXPECT_THROW(go_on(), std::runtime_error);
        EXPECT_THROW(writer.write(report(9)), std::runtime_error);
    }
    record.close();
    EXPECT_EQ(series(path, "loss"), std::vector<double>{0.0});
}

}  // namespace
}  // namespace faultline::gpt
