// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Index vectors of one device, brought to the host in one round trip: one launch on the current stream, and, when the
// caller has done what else there is to do, one wait.
#include "kernels/to_host.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <vector>

#include "shims/plan_memory.h"

namespace fi {
namespace {

// Where each vector begins, in bytes, is a multiple of this.
constexpr int64_t kAlign = 16;

// What is returned may be read, or dropped, once `to_host_wait` has returned: until then the device writes it.
std::vector<at::Tensor> to_host_shim(at::TensorList vectors) {
  require(!vectors.empty() && vectors.size() <= size_t{kMostToHost});
  const c10::Device device = vectors[0].device();
  int64_t bytes = 0;
  std::vector<int64_t> begins;
  for (const at::Tensor& t : vectors) {
    require(t.dim() == 1 && (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) && t.device() == device);
    begins.push_back(bytes);
    bytes += (t.numel() * t.element_size() + kAlign - 1) / kAlign * kAlign;
  }
  const c10::DeviceGuard device_guard(device);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // The device is done with the block by the time anybody may drop it, so torch's allocator hands it out again at once.
  const at::Tensor block = host_block(vectors[0], bytes, !device.is_cpu());
  ToHostParams p{};
  p.block = block.mutable_data_ptr();
  std::vector<at::Tensor> found;
  for (const at::Tensor& t : vectors) {
    const int64_t begin = begins[found.size()];
    found.push_back(view_of(block, t.dtype(), begin / t.element_size(), t.numel()));
    const int64_t stride = t.numel() > 1 ? t.stride(0) : 1;
    p.vectors[p.count++] = ToHostVector{t.const_data_ptr(), begin, t.numel(), stride, t.element_size() == 8};
  }
  check_launch(to_host(p, current_stream(vectors[0])), "to_host");
  return found;
}

// Waits for the current stream.
void to_host_wait_shim(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def("to_host(Tensor[] vectors) -> Tensor[]");
  m.impl("to_host", c10::DispatchKey::CompositeExplicitAutograd, &fi::to_host_shim);
  m.def("to_host_wait(Device device) -> ()", &fi::to_host_wait_shim);
}
