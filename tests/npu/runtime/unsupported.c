// Functions that torch_npu links but that the simulated device does not have.
//
// They fail and leave a message that torch_npu adds to its exception. Their parameters are unused,
// so this file declares none and includes no header of CANN. With NPU_SIM_TRACE=1 they also print
// the stack of the caller; ASCEND_LAUNCH_BLOCKING=1 makes it that of the operator.
#include <execinfo.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ERROR_FEATURE_UNSUPPORTED = 207000 };

static char message[256];

const char* aclGetRecentErrMsg(void) { return message; }

int refuse(const char* name) {
  snprintf(message, sizeof message, "%s: not part of the simulated device", name);
  fprintf(stderr, "%s\n", message);
  if (getenv("NPU_SIM_TRACE") != NULL) {
    void* frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
  }
  return ERROR_FEATURE_UNSUPPORTED;
}

#define UNSUPPORTED(name) \
  int name(void) { return refuse(#name); }
#define IGNORED(name) \
  int name(void) { return 0; }

// Attributes of compiled operators (operators.cpp). Those that it has need none.
IGNORED(aclopSetAttrBool)
IGNORED(aclopSetAttrDataType)
IGNORED(aclopSetAttrFloat)
IGNORED(aclopSetAttrInt)
IGNORED(aclopSetAttrListBool)
IGNORED(aclopSetAttrListFloat)
IGNORED(aclopSetAttrListInt)
IGNORED(aclopSetAttrListListInt)
IGNORED(aclopSetAttrString)

// Kernels in binary form
UNSUPPORTED(aclrtBinaryGetFunction)
UNSUPPORTED(aclrtBinaryLoadFromData)
UNSUPPORTED(aclrtGetFunctionAddr)
UNSUPPORTED(rtDevBinaryRegister)
UNSUPPORTED(rtFunctionRegister)
UNSUPPORTED(rtGetC2cCtrlAddr)
UNSUPPORTED(rtKernelLaunch)

// Memory that is shared between processes
UNSUPPORTED(aclrtMemExportToShareableHandle)
UNSUPPORTED(aclrtMemImportFromShareableHandle)
UNSUPPORTED(aclrtMemSetPidToShareableHandle)

// Dumps, callbacks and reports
IGNORED(aclmdlInitDump)
IGNORED(aclmdlSetDump)
IGNORED(aclmdlFinalizeDump)
IGNORED(aclrtProcessReport)
IGNORED(aclrtSetExceptionInfoCallback)
IGNORED(aclrtSubscribeReport)
IGNORED(aclrtUnSubscribeReport)
IGNORED(aclrtPeekAtLastError)
IGNORED(aclrtGetLastError)
IGNORED(aclAppLog)

// Settings without an effect on results
IGNORED(aclSetCompileopt)
IGNORED(aclopSetCompileFlag)
IGNORED(aclrtSetDeviceSatMode)
IGNORED(aclrtSetOpExecuteTimeOutV2)
IGNORED(aclrtSetOpWaitTimeout)
IGNORED(aclrtSetOpExecuteTimeOut)

size_t aclGetCompileoptSize(void) { return 1; }

int aclGetCompileopt(int option, char* value, size_t length) {
  (void)option;
  memset(value, 0, length);
  return 0;
}

// Profiler (libprofapi), which torch_npu also calls outside of profiling
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofRegTypeInfo)

uint64_t MsprofGetHashId(void) { return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }
