// NVML as far as launch/train/telemetry/gpu_clocks.py asks it, in the layout of nvml.h: one GPU, whose answers a test sets.
#include <cstring>

extern "C" {

typedef union {
    double dVal;
    int siVal;
    unsigned int uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    signed long long sllVal;
    unsigned short usVal;
} nvmlValue_t;

typedef struct {
    unsigned int fieldId;
    unsigned int scopeId;
    long long timestamp;
    long long latencyUsec;
    int valueType;   // an enum
    int nvmlReturn;  // an enum
    nvmlValue_t value;
} nvmlFieldValue_t;

int init_code = 0;
unsigned long long counters[96] = {0};
int counter_codes[96] = {0};
int counter_type = 3;  // NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
unsigned long long reasons = 0;
int reasons_code = 0;
unsigned int clock_mhz = 1755, limit_milliwatts = 700000;
int limit_code = 0;

static int gpu;

int nvmlInit_v2() { return init_code; }

const char *nvmlErrorString(int code) {
    return code == 4 ? "Insufficient Permissions" : code == 6 ? "Not Found" : "Unknown Error";
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    if (std::strcmp(address, "00000000:8d:00.0") != 0) return 6;  // NVML_ERROR_NOT_FOUND
    *device = &gpu;
    return 0;
}

int nvmlDeviceGetFieldValues(void *device, int count, nvmlFieldValue_t *values) {
    if (device != &gpu) return 2;  // NVML_ERROR_INVALID_ARGUMENT
    for (int place = 0; place < count; place++) {
        nvmlFieldValue_t &field = values[place];
        field.nvmlReturn = field.fieldId < 96 ? counter_codes[field.fieldId] : 3;  // NVML_ERROR_NOT_SUPPORTED
        field.valueType = counter_type;
        field.value.ullVal = 0xaaaaaaaaaaaaaaaaULL;
        if (field.nvmlReturn) continue;
        if (counter_type == 1) field.value.uiVal = counters[field.fieldId];
        else field.value.ullVal = counters[field.fieldId];
    }
    return 0;
}

#ifndef BEFORE_535
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits) {
    *bits = reasons;
    return device == &gpu ? reasons_code : 2;
}
#endif

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    *bits = reasons;
    return device == &gpu ? reasons_code : 2;
}

int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *mhz) {
    *mhz = clock_mhz;
    return device == &gpu && type == 1 ? 0 : 2;
}

int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned int *mhz) {
    *mhz = 1980;
    return device == &gpu && type == 1 ? 0 : 2;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) {
    *milliwatts = limit_milliwatts;
    return device == &gpu ? limit_code : 2;
}
}
