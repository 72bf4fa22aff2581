/* A CUDA driver that launches nothing: it keeps what it was asked for, read through the driver's own structures. */
#include <stdint.h>
#include <string.h>

typedef struct { unsigned id; char pad[4]; union { char bytes[64]; int number; } value; } attribute;
typedef struct {
    unsigned gx, gy, gz, bx, by, bz, shared;
    void *stream;
    attribute *attributes;
    unsigned count;
} config;

struct {
    unsigned grid[3], block[3], shared, attributes, attribute, on;
    uint64_t stream, function;
    uint64_t bytes;
    unsigned char arguments[4096];
    unsigned launches, modules, asked;
    int fail;
} told;

int cuModuleLoadData(void **module, const void *image) {
    told.modules++;
    *module = (void *)0x100;
    return memcmp(image, "bad", 3) ? 0 : 200;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x1234;
    return strcmp(name, "missing") ? 0 : 500;
}
int cuFuncSetAttribute(void *function, int which, int value) { told.asked = which == 8 ? value : 0; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 200 ? "device kernel image is invalid" : "named symbol not found"; return 0; }
int cuLaunchKernelEx(const config *c, void *function, void **parameters, void **extra) {
    if (told.fail) return told.fail;
    unsigned grid[3] = {c->gx, c->gy, c->gz}, block[3] = {c->bx, c->by, c->bz};
    memcpy(told.grid, grid, sizeof grid);
    memcpy(told.block, block, sizeof block);
    told.shared = c->shared;
    told.stream = (uint64_t)c->stream;
    told.function = (uint64_t)function;
    told.attributes = c->count;
    told.attribute = c->count ? c->attributes[0].id : 0;
    told.on = c->count ? (unsigned)c->attributes[0].value.number : 0;
    if (parameters || (uint64_t)extra[0] != 1 || (uint64_t)extra[2] != 2 || extra[4]) return 1;
    told.bytes = *(uint64_t *)extra[3];
    memcpy(told.arguments, extra[1], told.bytes);
    told.launches++;
    return 0;
}
