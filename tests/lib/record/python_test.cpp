// SPDX-License-Identifier: Apache-2.0
// Independent readers: h5dump, h5py, and xarray with named dimensions (tests/requirements.txt).
#include "python.hpp"

#include <csignal>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

#include <faultline/record/capture.hpp>
#include <faultline/record/record_file.hpp>
#include <faultline/record/run_file.hpp>

#include "support.hpp"

namespace faultline {
namespace {

using test::Folder;

constexpr const char* missing = "python3 has no h5py, xarray or h5netcdf (tests/requirements.txt)";
bool python_reads_hdf5() { return test::python_has({"h5py", "xarray", "h5netcdf"}); }

void write_example(const std::string& path) {
    RecordFile file = RecordFile::create(path, make_manifest("attribution", "faultline attribute x", "a = 1\n", 7));
    const std::vector<std::string> sites{"s_accumulate", "p_cast", "größer"};
    file.coordinate("layer0/site", sites);
    file.coordinate("layer0/head", std::vector<std::int64_t>{0, 1});
    file.write("layer0/tiles/p_cast/rms", std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8},
               {{"head", 2}, {"q_tile", 2}, {"k_tile", 2}}, {"root mean square of the local error", "1"});
    file.write("layer0/alone", std::vector<float>{1, 2, 3}, {{"site", 3}});
    file.write("layer0/bits", std::vector<std::uint16_t>{1}, {{"one", 1}});
    std::vector<float> large(1 << 18);
    for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<float>(i / 512);
    file.write("large", large, {{"row", 512}, {"col", 512}});
    file.commit();
}

TEST(RecordPython, H5dumpReadsEverything) {
    if (std::system("h5dump --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "h5dump is not installed (hdf5-tools)";
    const Folder folder;
    write_example(folder / "x.h5");
    EXPECT_EQ(std::system(("h5dump '" + std::string(folder / "x.h5") + "' > '" + (folder / "said") + "' 2>&1").c_str()),
              0);
    const std::string said = test::read_file(folder / "said");
    EXPECT_THAT(said, ::testing::HasSubstr("faultline attribute x"));
    EXPECT_THAT(said, ::testing::HasSubstr("s_accumulate"));
    EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("h5dump error")));
}

TEST(RecordPython, XarraySeesNamedDimensions) {
    if (!python_reads_hdf5()) GTEST_SKIP() << missing;
    const Folder folder;
    write_example(folder / "x.h5");
    EXPECT_EQ(test::python(R"(
import sys, h5py, numpy, xarray
path = sys.argv[1]
root = xarray.open_dataset(path, engine="h5netcdf")
assert root.attrs["kind"] == "attribution" and root.attrs["seed"] == 7 and root.attrs["config_toml"] == "a = 1\n"
assert root["large"].dims == ("row", "col")
assert (root["large"].values == numpy.arange(1 << 18).reshape(512, 512) // 512).all()
layer = xarray.open_dataset(path, engine="h5netcdf", group="layer0")
assert layer["site"].values.tolist() == ["s_accumulate", "p_cast", "größer"]
assert float(layer["alone"].sel(site="p_cast")) == 2
assert layer["head"].values.tolist() == [0, 1]
tiles = xarray.open_dataset(path, engine="h5netcdf", group="layer0/tiles/p_cast")
assert tiles["rms"].dims == ("head", "q_tile", "k_tile") and float(tiles["rms"][1, 0, 1]) == 6
assert tiles["rms"].attrs == {"units": "1", "long_name": "root mean square of the local error"}
with h5py.File(path) as f:
    assert f["large"].compression == "gzip" and f["large"].shuffle
    assert f["layer0/alone"].dims[0][0].name == "/layer0/site"
)",
                           folder / "x.h5"),
              "");
}

TEST(RecordPython, H5pyReadsACapture) {
    if (!python_reads_hdf5()) GTEST_SKIP() << missing;
    const Folder folder;
    TensorSet set;
    set.add(
        make_tensor<std::uint16_t>("layer0.q", {1, 1, 1, 2}, std::vector<std::uint16_t>{0x3F80, 0xC000}, Dtype::bf16));
    set.add(make_tensor<std::uint16_t>("half", {1}, std::vector<std::uint16_t>{0x3C00}, Dtype::f16));
    set.metadata = {{"loss", "1.28"}};
    write_hdf5_capture(folder / "x.h5", set, make_manifest("capture", "", "", 0));
    EXPECT_EQ(test::python(R"(
import sys, h5py, numpy
with h5py.File(sys.argv[1]) as f:
    q = f["layer0.q"]
    assert q.attrs["encoding"] == "bfloat16" and q.dtype == numpy.uint16
    assert (q[:].astype(numpy.uint32) << 16).view(numpy.float32).tolist() == [[[[1, -2]]]]
    assert f["half"].dtype == numpy.float16 and f["half"][0] == 1
    assert f.attrs["metadata.loss"] == "1.28"
)",
                           folder / "x.h5"),
              "");
}

TEST(RecordPython, WeReadWhatH5pyWrites) {
    if (!python_reads_hdf5()) GTEST_SKIP() << missing;
    const Folder folder;
    ASSERT_EQ(test::python(R"(
import sys, h5py, numpy
with h5py.File(sys.argv[1], "w") as f:
    f["layer0.q"] = numpy.array([0x3F80], numpy.uint16); f["layer0.q"].attrs["encoding"] = "bfloat16"
    f["k"] = numpy.array([1.5], ">f4"); f["h"] = numpy.array([0.5], numpy.float16); f["b"] = numpy.array([True, False])
    f.create_dataset("z", data=numpy.arange(100000.0), compression="gzip", shuffle=True)
    f.attrs["step"] = 3; f.attrs["note"] = "by hand"
)",
                           folder / "x.h5"),
              "");
    const TensorSet set = read_tensors(folder / "x.h5");
    EXPECT_EQ(set.at("layer0.q").to_double(), (std::vector<double>{1}));
    EXPECT_EQ(set.at("k").to_double(), (std::vector<double>{1.5}));
    EXPECT_EQ(set.at("h").to_double(), (std::vector<double>{0.5}));
    EXPECT_EQ(set.at("b").to_double(), (std::vector<double>{1, 0}));
    EXPECT_EQ(set.at("z").to_double()[99999], 99999);
    EXPECT_EQ(set.metadata.at("step"), "3");
    EXPECT_EQ(set.metadata.at("note"), "by hand");
}

TEST(RecordPython, ARunIsWatchedAndReadAfterItWasKilled) {
    if (!python_reads_hdf5()) GTEST_SKIP() << missing;
    const Folder folder;
    const std::string path = folder / "run.h5";
    const auto run_to = [&](std::int64_t steps) {
        RunFile run = RunFile::create(path, make_manifest("run", "", "", 0));
        const std::vector<Axis> axes{{"layer", 2}};
        const auto sigma = run.series("sigma", Dtype::f64, axes);
        run.start();
        for (std::int64_t i = 0; i < steps; ++i) {
            const std::vector<double> values{static_cast<double>(i), 2.0};
            run.set(sigma, std::span<const double>(values));
            run.end_step(10 * i);
        }
        return run;
    };
    const char* watch = R"(
import sys, h5py, zlib
with h5py.File(sys.argv[1], "r", libver="latest", swmr=True) as f:
    names = list(f["steps/checksum"].attrs["series"])
    assert names == ["step", "sigma"] and f["steps/checksum"].dtype == "<u4"
    for i in range(3):  # an independent CRC-32, of the bytes that a reader gets
        assert f["steps/checksum"][i].tolist() == [zlib.crc32(f["steps/" + n][i].tobytes()) for n in names]
    assert f["steps/step"][:].tolist() == [0, 10, 20] and f["steps/sigma"][:].tolist() == [[0, 2], [1, 2], [2, 2]]
)";
    const char* open = R"(
import sys, xarray
steps = xarray.open_dataset(sys.argv[1], engine="h5netcdf", group="steps")
assert steps["checksum"].dims == ("step", "series")
assert steps["sigma"].dims == ("step", "layer") and float(steps["sigma"].sel(step=20)[0]) == 2
)";
    {
        RunFile run = run_to(3);
        EXPECT_EQ(test::python(watch, path), "");
        run.close();
        EXPECT_EQ(test::python(open, path), "");
    }
    const pid_t child = ::fork();
    if (child == 0) {
        const RunFile run = run_to(3);
        ::kill(::getpid(), SIGKILL);
    }
    ::waitpid(child, nullptr, 0);
    EXPECT_EQ(test::python(watch, path), "");
    mend_run(path);
    EXPECT_EQ(test::python(open, path), "");
}

}  // namespace
}  // namespace faultline
