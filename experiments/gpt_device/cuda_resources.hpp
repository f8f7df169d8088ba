// SPDX-License-Identifier: Apache-2.0
// Device, stream, memory and graph as owners. Everything throws WorkError, one sentence, where CUDA fails. Private to this folder.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include <faultline/gpt_device/kernels.hpp>

struct CUgraphExec_st;
struct CUevent_st;

namespace faultline::gpt::on_device {

/// The device in use. WorkError where there is none of compute capability 9.0, which the kernels are compiled for.
class Device {
  public:
    Device();
    [[nodiscard]] const std::string& name() const { return name_; }

  private:
    std::string name_;
};

/// Blocks of a stream of high priority are placed before those of the others, also where its launches were recorded in a graph.
enum class Priority : unsigned char { high, low };

/// Held while launches are recorded into a graph, and while memory, streams and cuBLASLt's handles are made and given back. Several
/// runs may stand in one process, a thread each, and giving back waits for the whole device (CUDA runtime API, cudaFree,
/// cudaFreeHost; cublasLtDestroy), which ends every recording that is under way in another thread: "any associated capture
/// graphs are invalidated" (CUDA C++ programming guide, prohibited and unhandled operations).
[[nodiscard]] std::unique_lock<std::recursive_mutex> no_other_recording();

class OwnedStream {
  public:
    explicit OwnedStream(Priority priority = Priority::high);
    ~OwnedStream();
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;
    operator Stream() const { return stream_; }  // NOLINT(google-explicit-constructor)

  private:
    Stream stream_ = nullptr;
};

/// A second stream, and the events by which it and a main one wait for each other; both may be in a graph that is recorded.
class SideStream {
  public:
    explicit SideStream(Priority priority = Priority::high);
    ~SideStream();
    SideStream(const SideStream&) = delete;
    SideStream& operator=(const SideStream&) = delete;
    [[nodiscard]] Stream stream() const { return stream_; }
    /// What comes on this stream waits for what is on `main` now; what comes on `main`, for what is on this one.
    void follow(Stream main) const;
    void join(Stream main) const;

  private:
    OwnedStream stream_;
    CUevent_st* event_ = nullptr;
};

/// A place on a stream that another may wait for; before the first mark there is nothing to wait for.
class Mark {
  public:
    Mark();
    ~Mark();
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;
    void set(Stream on);
    /// Once for each set().
    void wait(Stream waiting);
    /// There is nothing to wait for: a mark that was recorded in one graph is nothing to another's launches.
    void clear() { set_ = false; }

  private:
    CUevent_st* event_ = nullptr;
    bool set_ = false;
};

class Memory {
  public:
    /// WorkError that says what it is for, where less is free.
    Memory(std::size_t bytes, const std::string& what);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    [[nodiscard]] char* data() const { return data_; }

  private:
    char* data_ = nullptr;
};

/// Host memory that copies can go from and to while the host works.
class PinnedMemory {
  public:
    explicit PinnedMemory(std::size_t bytes);
    ~PinnedMemory();
    PinnedMemory(PinnedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
    PinnedMemory& operator=(PinnedMemory&&) = delete;
    [[nodiscard]] char* data() const { return data_; }

  private:
    char* data_ = nullptr;
};

/// Launches recorded once and launched together.
class Graph {
  public:
    Graph() = default;
    Graph(Stream stream, const std::function<void()>& launches);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(Graph&& other) noexcept {
        std::swap(executable_, other.executable_);
        return *this;
    }
    void launch(Stream stream) const;

  private:
    CUgraphExec_st* executable_ = nullptr;
};

void upload(void* to, const void* from, std::size_t bytes, Stream stream);
/// From one place on the device to another.
void copy(void* to, const void* from, std::size_t bytes, Stream stream);
void clear(void* to, std::size_t bytes, Stream stream);
/// Waits for everything on the stream and for the copy.
void download(void* to, const void* from, std::size_t bytes, Stream stream);
void download_later(void* to, const void* from, std::size_t bytes, Stream stream);
/// `rows` rows of `bytes` each, `stride` bytes apart there, one after the other here.
void download_rows_later(void* to, const void* from, std::size_t rows, std::size_t bytes, std::size_t stride,
                         Stream stream);
void wait(Stream stream);

}  // namespace faultline::gpt::on_device
