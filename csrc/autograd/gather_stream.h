// A stream for each device on which gradients are gathered while the backward pass computes the next ones.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace sparse_opt {

// Holds the gradients of one call at a time, for all optimizers together. Thread-safe.
class GatherStream {
 public:
  // Call work() with the device's gather stream current, after all work that `source` has now. `gradients`, whose
  // memory belongs to the stream `source`, are held until the next call or release(); `source` then waits for the work.
  static void run(std::vector<at::Tensor> gradients, c10::Stream source, const std::function<void()>& work);
  static void release(at::Device device);

  explicit GatherStream(at::Device device);

 private:
  static GatherStream* of(at::Device device, bool create);

  struct Held {
    std::vector<at::Tensor> gradients;
    c10::Stream stream;
  };
  std::optional<Held> take_held();

  std::mutex mutex_;
  c10::Stream stream_;
  c10::Event source_done_, work_done_;
  std::optional<Held> held_;
};

}  // namespace sparse_opt
