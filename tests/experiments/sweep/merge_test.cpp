// SPDX-License-Identifier: Apache-2.0
// The file that the runs are merged into, as independent readers see it: h5py and xarray, from another folder, after the sweep
// has been moved, with a run that is missing and recipes of different sizes.
#include <cstdlib>
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>

#include <faultline/record/record_reader.hpp>

#include "small_sweep.hpp"

namespace faultline::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* missing = "python3 has no h5py, xarray or h5netcdf (tests/requirements.txt)";

constexpr const char* look = R"(
import importlib.util
sys.exit(not all(importlib.util.find_spec(name) for name in ('h5py', 'xarray', 'h5netcdf')))
)";

constexpr const char* compare = R"(
import os, h5py, numpy as np, xarray as xr
path = sys.argv[1]
os.chdir('/')
with h5py.File(path) as f:
    steps = f['steps']
    names = [n.decode() for n in steps['run'][...]]
    virtual = [n for n in steps if steps[n].is_virtual]
    assert {'loss', 'sigma_q', 'max_logit', 'zero_sum', 'injected_rms'} <= set(virtual), virtual
    gone = 0
    for i, name in enumerate(names):
        record = os.path.join(os.path.dirname(path), 'runs', name + '.h5')
        if not os.path.exists(record):
            gone += 1
            assert all(np.isnan(steps[v][i]).all() for v in virtual), name
            continue
        with h5py.File(record) as r:
            for v in virtual:
                if v not in r['steps']:
                    assert np.isnan(steps[v][i]).all(), v
                    continue
                want = r['steps'][v][...]
                sizes = dict(zip([d[0].name.split('/')[-1] for d in r['steps'][v].dims], want.shape))
                block = tuple(slice(0, sizes.get(d[0].name.split('/')[-1], 1)) for d in list(steps[v].dims)[1:])
                have = steps[v][i][block]
                assert want.tobytes() == have.tobytes(), (name, v)
                rest = steps[v][i].copy()
                rest[block] = np.nan
                assert np.isnan(rest).all(), (name, v)
    assert gone == int(sys.argv[2]), gone
data = xr.open_dataset(path, group='steps', engine='h5netcdf')
assert data['loss'].dims == ('run', 'step') and data['max_logit'].dims == ('run', 'step', 'layer', 'head'), data
assert list(data['run'].values) == names
faulty = data['loss'].where(data['source'] != 'none', drop=True)
assert faulty.sizes['run'] > 0
)";

/// What the script says of the file, "" where nothing is wrong; `gone`: as many records are missing.
std::string python(const std::string& script, const std::string& arguments) {
    const char* given = std::getenv("FAULTLINE_PYTHON");
    const Folder folder;
    folder.write("script.py", "import sys\n" + script);
    const std::string command = fmt::format("'{}' '{}' {} > '{}' 2>&1", given != nullptr ? given : "python3",
                                            folder / "script.py", arguments, folder / "said");
    if (std::system(command.c_str()) == 0) return "";
    std::ifstream in(folder / "said");
    return "python failed: " + std::string{std::istreambuf_iterator<char>(in), {}};
}

std::string compared(const std::string& path, int gone) { return python(compare, fmt::format("'{}' {}", path, gone)); }

TEST(Sweep, MergedFileIsReadWhereverItStands) {
    if (!python(look, "").empty()) GTEST_SKIP() << missing;
    const Folder folder;
    const std::string file = small_sweep(folder, 20, "seeds = [0, 1]");
    ASSERT_EQ(run_program({"sweep", file, "-o", folder / "s", "--quiet"}).status, 0);
    fs::create_directories(folder / "elsewhere/below");
    fs::rename(folder / "s", folder / "elsewhere/below/moved");
    const std::string moved = folder / "elsewhere/below/moved";
    EXPECT_EQ(compared(moved + "/sweep.h5", 0), "");
    fs::remove(run_files(moved, ".h5").front());
    EXPECT_EQ(compared(moved + "/sweep.h5", 1), "");  // its values are NaN
    // Merged anew it is not counted, and the runs are still there; run again it is made.
    EXPECT_EQ(run_program({"sweep", "merge", moved}).status, 1);
    EXPECT_EQ(RecordReader(moved + "/sweep.h5").attribute("", "complete"), "0");
    EXPECT_EQ(run_program({"sweep", moved, "--quiet"}).status, 0);
    EXPECT_EQ(RecordReader(moved + "/sweep.h5").attribute("", "complete"), "1");
    if (std::system("h5dump --version > /dev/null 2>&1") == 0) {
        EXPECT_EQ(std::system(("cd / && h5dump -d /steps/loss '" + moved + "/sweep.h5' | grep -q 'DATA {'").c_str()),
                  0);
    }
    EXPECT_EQ(run_program({"inspect", moved + "/sweep.h5"}).status, 0);
}

// Two sizes and two optimizers: four tables, and series as large as the largest of them has.
TEST(Sweep, RecipesOfDifferentSizesAreInOneFile) {
    if (!python(look, "").empty()) GTEST_SKIP() << missing;
    const Folder folder;
    const std::string file =
        small_sweep(folder, 12, "", "",
                    "[[recipe]]\nname = \"small\"\nlayers = 1\nsteps = 8\n[[recipe]]\nname = \"large\"\nheads = 4\n"
                    "[vary]\noptimizer = [\"adamw\", \"muon\"]\n");
    const Outcome run = run_program({"sweep", file, "-o", folder / "s", "--quiet"});
    ASSERT_EQ(run.status, 0) << run.err;
    for (const char* recipe :
         {"small,optimizer=adamw", "small,optimizer=muon", "large,optimizer=adamw", "large,optimizer=muon"})
        EXPECT_THAT(run.out, ::testing::HasSubstr(std::string("recipe ") + recipe + "\n"));
    EXPECT_EQ(compared(folder / "s/sweep.h5", 0), "");
    const RecordReader reader(folder / "s/sweep.h5");
    EXPECT_EQ(reader.manifest().kind, "dissociation");
    EXPECT_EQ(reader.read("recipes/large,optimizer=muon/outcome/train_loss").shape,
              (std::vector<std::int64_t>{2, 1, 1}));
    std::vector<std::int64_t> shape;
    for (const Axis& axis : reader.axes("steps/max_logit")) shape.push_back(axis.size);
    EXPECT_EQ(shape, (std::vector<std::int64_t>{8, 12, 2, 4}));
}

}  // namespace
}  // namespace faultline::test
