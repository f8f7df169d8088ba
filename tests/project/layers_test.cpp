// SPDX-License-Identifier: Apache-2.0
// The tree keeps its own rules, and the checks that say so find what is planted against them.
#include "layers.hpp"
#include "paths.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace faultline::project {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::string> texts(const std::vector<Violation>& violations) {
    std::vector<std::string> all;
    all.reserve(violations.size());
    for (const Violation& violation : violations) all.push_back(violation.text());
    return all;
}

// A small tree that keeps every rule, in a temporary folder, to plant faults in.
class PlantedTree : public testing::Test {
  protected:
    PlantedTree() {
        write("lib/base/error.hpp", "#include <stdexcept>\n");
        write("lib/format/format.hpp", "#include <faultline/base/error.hpp>\n");
        write("lib/truth/truth.hpp", "#include <faultline/format/format.hpp>\n#include \"detail/ball.hpp\"\n");
        write("lib/truth/detail/ball.hpp", "");
        write("kernels/plan/plan.hpp", "#include <faultline/format/format.hpp>\n");
        write("kernels/cpu/forward.hpp", "#include <faultline/plan/plan.hpp>\n");
        write("injectors/law.hpp", "#include <faultline/cpu/forward.hpp>\n");
        write("probes/coherence/coherence.hpp", "#include <faultline/truth/truth.hpp>\n");
        write("experiments/attribution/attribute.cpp",
              "#include <faultline/injectors/law.hpp>\n#include <faultline/coherence/coherence.hpp>\n"
              "#include <faultline/attribution.hpp>\n");
        write("kernels/cpu/CMakeLists.txt",
              "faultline_library(cpu DEPENDS faultline::plan) # not faultline::attribution\n");
    }
    ~PlantedTree() override { fs::remove_all(root_); }

    void write(const fs::path& file, const std::string& text) const {
        fs::create_directories((root_ / file).parent_path());
        std::ofstream(root_ / file) << text;
    }
    [[nodiscard]] std::vector<std::string> layers() const { return texts(layer_violations(root_)); }
    [[nodiscard]] std::vector<std::string> licences() const { return texts(licence_violations(root_)); }

  private:
    static fs::path unused_folder() {
        std::string name = (fs::temp_directory_path() / "faultline-layers-XXXXXX").string();
        if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
        return name;
    }
    fs::path root_ = unused_folder();
};

TEST(Layers, NoIncludeOfTheTreeRunsAgainstThem) { EXPECT_THAT(texts(layer_violations(test::source_dir())), IsEmpty()); }

TEST(Licence, EveryFileOfTheTreeNamesIt) { EXPECT_THAT(texts(licence_violations(test::source_dir())), IsEmpty()); }

TEST_F(PlantedTree, KeepsTheRulesAtFirst) { EXPECT_THAT(layers(), IsEmpty()); }

TEST_F(PlantedTree, LibMayNotUseKernels) {
    write("lib/truth/truth.cpp", "// a comment\n#include <faultline/cpu/forward.hpp>\n");
    EXPECT_THAT(layers(),
                ElementsAre("lib/truth/truth.cpp:2: lib/truth uses kernels/cpu, which stands in a layer above it"));
}

TEST_F(PlantedTree, LibMayNotUseWhatComesAfterInLib) {
    write("lib/format/bulk.cpp", "#  include \"faultline/truth/truth.hpp\"  // why\n");
    EXPECT_THAT(layers(), ElementsAre("lib/format/bulk.cpp:1: lib/format uses lib/truth, which comes after it in lib"));
}

TEST_F(PlantedTree, DeviceSourcesAreSeen) {
    write("kernels/cuda/forward.cu", "#include <faultline/injectors/law.hpp>\n");
    EXPECT_THAT(
        layers(),
        ElementsAre("kernels/cuda/forward.cu:1: kernels/cuda uses injectors, which stands in a layer above it"));
}

TEST_F(PlantedTree, InjectorsAndProbesKnowNothingOfEachOther) {
    write("injectors/law.cpp", "#include <faultline/coherence/coherence.hpp>\n");
    EXPECT_THAT(layers(), ElementsAre("injectors/law.cpp:1: injectors and probes know nothing of each other: injectors "
                                      "uses probes/coherence"));
}

TEST_F(PlantedTree, RelativePathsAreResolved) {
    write("kernels/plan/plan.cpp", "#include \"../../experiments/attribution/attribute.cpp\"\n");
    write("lib/format/odd.cpp", "#include \"kernels/plan/plan.hpp\"\n");
    EXPECT_THAT(layers(),
                ElementsAre("lib/format/odd.cpp:1: lib/format uses kernels/plan, which stands in a layer above it",
                            "kernels/plan/plan.cpp:1: kernels/plan uses experiments/attribution, which stands in "
                            "a layer above it"));
}

TEST_F(PlantedTree, CyclesWithinALayerAreFound) {
    write("kernels/plan/plan.cpp", "#include <faultline/cpu/forward.hpp>\n");
    EXPECT_THAT(layers(), testing::Contains("kernels/plan/plan.cpp:1: kernels/plan and kernels/cpu use each other"));
}

TEST_F(PlantedTree, FoldersMustExistAndBeNamedOnce) {
    write("lib/format/a.cpp", "#include <faultline/fromat/format.hpp>\n");
    write("probes/cpu/rate.hpp", "");
    EXPECT_THAT(layers(),
                ElementsAre("probes/cpu: shares its name with kernels/cpu: <faultline/cpu/...> would mean both",
                            "lib/format/a.cpp:1: names \"fromat\", which is no folder of the tree"));
}

TEST_F(PlantedTree, LibFoldersNeedAPlaceInTheOrder) {
    write("lib/extra/extra.hpp", "");
    EXPECT_THAT(layers(),
                ElementsAre("lib/extra: has no place in the order of lib's folders (tests/project/layers.cpp)"));
}

TEST_F(PlantedTree, HeadersThatGatherTheLibraryStandAtTheTop) {
    write("kernels/cpu/all.cpp", "#include <faultline/attribution.hpp>\n");
    EXPECT_THAT(layers(),
                ElementsAre("kernels/cpu/all.cpp:1: <faultline/attribution.hpp> gathers layers above this one"));
}

TEST_F(PlantedTree, TargetsInCMakeFilesCount) {
    write("lib/base/CMakeLists.txt", "faultline_library(base\n  DEPENDS faultline::format)\n");
    EXPECT_THAT(layers(),
                ElementsAre("lib/base/CMakeLists.txt:2: lib/base uses lib/format, which comes after it in lib"));
}

TEST_F(PlantedTree, LicenceLineIsMissedAndMisspellingsAreFound) {
    for (const char* file :
         {"lib/base/error.hpp", "lib/format/format.hpp", "lib/truth/truth.hpp", "lib/truth/detail/ball.hpp",
          "kernels/plan/plan.hpp", "kernels/cpu/forward.hpp", "injectors/law.hpp", "probes/coherence/coherence.hpp",
          "experiments/attribution/attribute.cpp"})
        write(file, "// SPDX-License-Identifier: Apache-2.0\n");
    write("kernels/cpu/CMakeLists.txt", "# SPDX-License-Identifier: Apache-2.0\n");
    write("tests/run", "#!/usr/bin/env bash\n# SPDX-License-Identifier: Apache-2.0\n");
    write("tests/data/notes.txt", "no source\n");
    EXPECT_THAT(licences(), IsEmpty());

    const std::string missing = ": has no line \"SPDX-License-Identifier: Apache-2.0\" among its first three";
    write("kernels/plan/plan.hpp", "// SPDX-License-Identifier: Apache 2.0\n");
    write("lib/base/error.hpp", "\n\n\n// SPDX-License-Identifier: Apache-2.0\n");
    write("tests/run", "#!/usr/bin/env bash\n");
    write("kernels/plan/presets/fa2.toml", "name = \"fa2\"\n");
    EXPECT_THAT(licences(), ElementsAre("lib/base/error.hpp" + missing, "kernels/plan/plan.hpp" + missing,
                                        "kernels/plan/presets/fa2.toml" + missing, "tests/run" + missing));
}

}  // namespace
}  // namespace faultline::project
