// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/cuda_resources.hpp>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <faultline/base/cuda_device.cuh>
#include <faultline/base/error.hpp>

namespace faultline::gpt::on_device {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

}  // namespace

std::unique_lock<std::recursive_mutex> no_other_recording() {
    static std::recursive_mutex mutex;
    return std::unique_lock(mutex);
}

Device::Device() {
    expect_cuda_device();
    int device = 0;
    check(cudaGetDevice(&device), "choosing a device");
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "asking the device");
    name_ = properties.name;
    if (properties.major != 9)
        throw WorkError(fmt::format("device cuda: {} has compute capability {}.{}: training expects 9.0", name_,
                                    properties.major, properties.minor));
}

OwnedStream::OwnedStream(Priority priority) {
    const auto alone = no_other_recording();
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking the device");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority == Priority::high ? greatest : least),
          "making a stream");
}
OwnedStream::~OwnedStream() {
    const auto alone = no_other_recording();
    (void)cudaStreamDestroy(stream_);
}

SideStream::SideStream(Priority priority) : stream_(priority) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event");
}
SideStream::~SideStream() { (void)cudaEventDestroy(event_); }
void SideStream::follow(Stream main) const {
    check(cudaEventRecord(event_, main), "recording an event");
    check(cudaStreamWaitEvent(stream_, event_, 0), "waiting for an event");
}
void SideStream::join(Stream main) const {
    check(cudaEventRecord(event_, stream_), "recording an event");
    check(cudaStreamWaitEvent(main, event_, 0), "waiting for an event");
}

Mark::Mark() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event"); }
Mark::~Mark() { (void)cudaEventDestroy(event_); }
void Mark::set(Stream on) {
    check(cudaEventRecord(event_, on), "recording an event");
    set_ = true;
}
void Mark::wait(Stream waiting) {
    if (!std::exchange(set_, false)) return;
    check(cudaStreamWaitEvent(waiting, event_, 0), "waiting for an event");
}

Memory::Memory(std::size_t bytes, const std::string& what) {
    const auto alone = no_other_recording();
    std::size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "asking for the free memory");
    if (bytes > free)
        throw WorkError(fmt::format("device cuda: the run needs {}: expected at most the {:.2f} GiB that are free",
                                    what, static_cast<double>(free) * 0x1p-30));
    check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes), "asking for memory");
}
Memory::~Memory() {
    const auto alone = no_other_recording();
    (void)cudaFree(data_);
}

PinnedMemory::PinnedMemory(std::size_t bytes) {
    const auto alone = no_other_recording();
    check(cudaMallocHost(reinterpret_cast<void**>(&data_), bytes), "asking for host memory");
}
PinnedMemory::~PinnedMemory() {
    if (data_ == nullptr) return;
    const auto alone = no_other_recording();
    (void)cudaFreeHost(data_);
}

Graph::Graph(Stream stream, const std::function<void()>& launches) {
    const auto alone = no_other_recording();
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
    cudaGraph_t graph = nullptr;
    try {
        launches();
    } catch (...) {
        (void)cudaStreamEndCapture(stream, &graph);
        throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "recording a graph");
    const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(made, "making a graph");
}
Graph::~Graph() {
    if (executable_ == nullptr) return;
    const auto alone = no_other_recording();
    (void)cudaGraphExecDestroy(executable_);
}
void Graph::launch(Stream stream) const { check(cudaGraphLaunch(executable_, stream), "launching a graph"); }

void upload(void* to, const void* from, std::size_t bytes, Stream stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "copying to the device");
}
void copy(void* to, const void* from, std::size_t bytes, Stream stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copying on the device");
}
void clear(void* to, std::size_t bytes, Stream stream) {
    check(cudaMemsetAsync(to, 0, bytes, stream), "clearing memory");
}
void download_later(void* to, const void* from, std::size_t bytes, Stream stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copying from the device");
}
void download(void* to, const void* from, std::size_t bytes, Stream stream) {
    download_later(to, from, bytes, stream);
    wait(stream);
}
void download_rows_later(void* to, const void* from, std::size_t rows, std::size_t bytes, std::size_t stride,
                         Stream stream) {
    check(cudaMemcpy2DAsync(to, bytes, from, stride, bytes, rows, cudaMemcpyDeviceToHost, stream),
          "copying from the device");
}
void wait(Stream stream) { check(cudaStreamSynchronize(stream), "running on the device"); }

}  // namespace faultline::gpt::on_device
