// SPDX-License-Identifier: Apache-2.0
// What numpy reads of ours, and what we read of numpy's. Needs numpy (tests/requirements.txt).
#include <cstdlib>

#include <faultline/tensor/npy.hpp>

#include "python.hpp"
#include "support.hpp"

namespace faultline {
namespace {

using test::Folder;

TEST(NpyPython, NumpyReadsOurFiles) {
    if (!test::python_has({"numpy"})) GTEST_SKIP() << "python3 has no numpy (tests/requirements.txt)";
    const Folder folder;
    write_npy(folder / "f4.npy", make_tensor<float>("f4", {2, 3}, std::vector<float>{0, 1, 2, 3, 4, 5.5f}));
    write_npy(folder / "i8.npy", make_tensor<std::int64_t>("i8", {}, std::vector<std::int64_t>{-7}));
    write_npy(folder / "b.npy", make_tensor<std::uint8_t>("b", {1}, std::vector<std::uint8_t>{1}, Dtype::boolean));
    write_npy(folder / "bf.npy",
              make_tensor<std::uint16_t>("bf", {1, 2}, std::vector<std::uint16_t>{0x3F80, 0xC000}, Dtype::bf16));
    EXPECT_EQ(test::python(R"(
import numpy, sys
load = lambda name: numpy.load(sys.argv[1] + "/" + name + ".npy")
assert load("f4").dtype == numpy.float32 and load("f4").tolist() == [[0, 1, 2], [3, 4, 5.5]]
assert load("i8").shape == () and load("i8") == -7
assert load("b").dtype == numpy.bool_ and load("b").tolist() == [True]
bits = load("bf")
assert bits.shape == (1, 2) and bits.view(numpy.uint16).tolist() == [[0x3F80, 0xC000]]
)",
                           folder.path().string()),
              "");
}

TEST(NpyPython, WeReadNumpysFiles) {
    if (!test::python_has({"numpy"})) GTEST_SKIP() << "python3 has no numpy (tests/requirements.txt)";
    const Folder folder;
    ASSERT_EQ(test::python(R"(
import numpy, sys
save = lambda name, a: numpy.save(sys.argv[1] + "/" + name + ".npy", a)
a = numpy.arange(24.0).reshape(2, 3, 4)
save("c", a); save("fortran", numpy.asfortranarray(a)); save("big", a.astype(">f8")); save("half", a.astype("<f2"))
save("raw", numpy.array([0x3F80], "<u2").view("V2")); save("object", numpy.array([None]))
)",
                           folder.path().string()),
              "");
    std::vector<double> expected;
    for (int i = 0; i < 24; ++i) expected.push_back(i);
    for (const char* name : {"c", "fortran", "big", "half"}) {
        const TensorSet set = read_npy(folder / (std::string(name) + ".npy"));
        EXPECT_EQ(set.at(name).shape, (std::vector<std::int64_t>{2, 3, 4}));
        EXPECT_EQ(set.at(name).to_double(), expected) << name;
    }
    EXPECT_EQ(read_npy(folder / "raw.npy").at("raw").to_double(), (std::vector<double>{1}));
    EXPECT_THAT(test::request_error([&] { (void)read_npy(folder / "object.npy"); }),
                ::testing::HasSubstr("never unpickled"));
}

}  // namespace
}  // namespace faultline
