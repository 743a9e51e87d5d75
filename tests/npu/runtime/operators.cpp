// The compiled operators (aclop) that torch_npu calls without the dispatcher: `all_gather` pads
// small tensors with Fill and PadV3 (ProcessGroupHCCL::byte_alignment). All others are refused.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "stream.h"

// CANN declares these types, which only its own libraries define.
struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> sizes;
  aclFormat format;
};

struct aclDataBuffer {
  void* data;
  size_t size;
};

struct aclopAttr {};

extern "C" int refuse(const char* name);

namespace {

size_t element_size(aclDataType type) {
  switch (type) {
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
      return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
      return 8;
    default:
      return 0;
  }
}

// Write copies of one element to `count` places.
void fill(char* target, const char* element, size_t size, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    memcpy(target + i * size, element, size);
  }
}

bool is_device_memory(const void* pointer) {
  aclrtPtrAttributes attributes;
  aclrtPointerGetAttributes(pointer, &attributes);
  return attributes.location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
}

// Push a task that fills the output after the first `kept` bytes of another input.
aclError push(
    const aclDataBuffer* values, const aclDataBuffer* kept, const aclDataBuffer* output,
    size_t size, aclrtStream stream) {
  const auto* value = static_cast<const char*>(values->data);
  // Host memory belongs to the caller, so it is read before the task runs.
  const std::string copy = is_device_memory(value) ? "" : std::string(value, size);
  auto* target = static_cast<char*>(output->data);
  const size_t bytes = output->size;
  const size_t offset = kept == nullptr ? 0 : kept->size;
  const void* source = kept == nullptr ? nullptr : kept->data;
  npu::stream_of_handle(stream)->push([=] {
    if (source != nullptr) {
      memmove(target, source, offset);
    }
    fill(target + offset, copy.empty() ? value : copy.data(), size, (bytes - offset) / size);
    return ACL_SUCCESS;
  });
  return ACL_SUCCESS;
}

// True if the tensors differ in their last size only and all others are 1.
bool is_row(const aclTensorDesc& desc) {
  for (size_t i = 0; i + 1 < desc.sizes.size(); ++i) {
    if (desc.sizes[i] != 1) {
      return false;
    }
  }
  return true;
}

}  // namespace

extern "C" {

aclTensorDesc* aclCreateTensorDesc(
    aclDataType type, int num_dims, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, std::vector<int64_t>(dims, dims + num_dims), format};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }

aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->sizes.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  *size = desc->sizes.at(index);
  return ACL_SUCCESS;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return new aclDataBuffer{data, size};
}

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }

// Fill(dims, value), PadV3(x, paddings, value) of a row at its end.
aclError aclopCompileAndExecute(
    const char* type, int num_inputs, const aclTensorDesc* const input_descs[],
    const aclDataBuffer* const inputs[], int, const aclTensorDesc* const output_descs[],
    aclDataBuffer* const outputs[], const aclopAttr*, aclopEngineType, aclopCompileType,
    const char*, aclrtStream stream) {
  const std::string name = type;
  const size_t size = element_size(output_descs[0]->type);
  if (name == "Fill" && num_inputs == 2 && size != 0) {
    return push(inputs[1], nullptr, outputs[0], size, stream);
  }
  if (name == "PadV3" && num_inputs == 3 && size != 0 && is_row(*input_descs[0])) {
    return push(inputs[2], inputs[0], outputs[0], size, stream);
  }
  return refuse(type);
}

}  // extern "C"
