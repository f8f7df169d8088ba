// SPDX-License-Identifier: Apache-2.0
// An HDF5 file that grows step by step (kind "run") and can be read meanwhile: HDF5's single writer, multiple readers
// mode. A killed run leaves every completed step readable. Readers open it with SWMR (h5py: swmr=True) while the writer
// lives or after it was killed, and plainly after close() or mend_run().
//
// Series are not compressed: in this mode each flush of a part-filled compressed chunk would write it anew elsewhere and
// leave the old one as a hole in the file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <faultline/record/axes.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/tensor/dtype.hpp>

namespace faultline {

class RunFile {
  public:
    /// One quantity over the steps: dataset steps/NAME over (step, axes…).
    struct Series {
        std::size_t index = 0;
    };

    /// RequestError when the path cannot name a file, WorkError when the disk refuses. Until start() it is PATH.partial.
    static RunFile create(const std::string& path, const Manifest& manifest);
    /// Goes on with a run that ended, or was killed at any moment, after the step numbered `last_step` (a checkpoint's);
    /// later steps are dropped. What follows is what follows create(): the same coordinates, attributes and series, then
    /// start(); afterwards the file has the manifest that it had, and holds what it would hold had it never stopped. The
    /// steps kept go into a new file, PATH.partial, and start() gives it the name, so that a run killed while it resumes
    /// has lost nothing (a reader that watched the old file has to open the new one). A step is kept when it and all
    /// before it have numbers up to `last_step`: see last_step() for the last of them.
    /// RequestError when the file is missing or no run, or (at the declaration, or at start()) when what is declared is
    /// not what the run has; WorkError when somebody has it open or the disk refuses.
    /// `change`: what of the manifest is to be another, for settings that a run may be resumed with (its length).
    static RunFile resume(const std::string& path, std::int64_t last_step,
                          const std::function<void(Manifest&)>& change = {});
    RunFile(RunFile&&) noexcept;
    RunFile& operator=(RunFile&&) noexcept;
    ~RunFile();  ///< closes; completed steps stay

    /// Before start(): coordinates of a dimension ("steps/layer"), attributes, and every series.
    void coordinate(const std::string& path, std::span<const std::string> labels, const About& about = {});
    void coordinate(const std::string& path, std::span<const std::int64_t> values, const About& about = {});
    void coordinate(const std::string& path, std::span<const double> values, const About& about = {});
    void attribute(const std::string& object, const std::string& name, const std::string& value);
    /// `axes` are those after the step, fixed for the run.
    [[nodiscard]] Series series(const std::string& name, Dtype dtype, std::span<const Axis> axes,
                                const About& about = {});
    /// RequestError when a step of the run that goes on is not what was written.
    /// From here on readers can watch under the final name, and nothing but steps can be added.
    void start();

    /// This step's values of a series, row-major over its axes. A series that is not set in a step gets NaN (floats) or
    /// 0. WorkError when type or number is not the series'.
    template <class T>
    void set(Series series, std::span<const T> values) {
        set_bytes(series, dtype_of<T>(), std::as_bytes(values));
    }
    template <class T>
    void set(Series series, T value) {
        set(series, std::span<const T>(&value, 1));
    }
    void set_bytes(Series series, Dtype dtype, std::span<const std::byte> bytes);
    /// Appends the step to every series, a checksum of each (row_checksums.hpp), and flushes; the step number goes last, so
    /// a step that has one is complete.
    /// WorkError when the disk refuses; the file then stays as it is, as after a kill, and takes no further step.
    void end_step(std::int64_t step);
    /// Steps completed, those of before resume() included.
    [[nodiscard]] std::int64_t steps() const;
    /// The number of the last of them; nothing when there is none.
    [[nodiscard]] std::optional<std::int64_t> last_step() const;
    /// Leaves SWMR mode and closes: any reader opens the file then. WorkError when the disk refuses.
    void close();

  private:
    struct State;
    explicit RunFile(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

/// Clears the mark of a killed writer, so that readers without SWMR open the file. The steps stay as they are. RequestError
/// when the file is not HDF5; WorkError when its writer is still alive.
void mend_run(const std::string& path);

}  // namespace faultline
