// Loads the native library of a wheel and calls a few of its functions: probe LIBRARY.
// Prints the instruction set that the library chose, then a line for each one that it has: its name and a hash of its results.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#if defined(_WIN32)
#include <windows.h>
#define OPEN(path) ((void*)LoadLibraryA(path))
#define FIND(library, name) ((void*)GetProcAddress((HMODULE)(library), name))
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW)
#define FIND(library, name) dlsym(library, name)
#endif

static float noise[20000], tanhs[20000];

static uint64_t hashed(uint64_t hash, const void* data, size_t size) {
    for (size_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t*)data)[i]) * 1099511628211ull;
    return hash;
}

int main(int count, char** arguments) {
    void* library = count == 2 ? OPEN(arguments[1]) : NULL;
    if (!library) return printf("the library cannot be loaded\n"), 1;
    const char* (*isa)(void) = FIND(library, "outrider_isa");
    const char* (*isas)(void) = FIND(library, "outrider_isas");
    int32_t (*select)(const char*) = FIND(library, "outrider_select_isa");
    void (*gumbel)(uint64_t, uint32_t, uint32_t, uint32_t, int64_t, float*) = FIND(library, "outrider_gumbel");
    int64_t (*argmax)(const float*, int64_t) = FIND(library, "outrider_argmax");
    void (*elementwise)(int32_t, const float*, float*, int64_t) = FIND(library, "outrider_elementwise");
    if (!isa || !isas || !select || !gumbel || !argmax || !elementwise) return printf("a function is missing\n"), 1;
    printf("chosen %s\n", isa());
    char names[256];
    strncpy(names, isas(), sizeof names - 1);
    for (char* name = strtok(names, " ,\n"); name; name = strtok(NULL, " ,\n")) {
        if (!select(name)) continue;  // this processor lacks it
        gumbel(7, 0, 1, 2, 20000, noise);
        int64_t best = argmax(noise, 20000);
        elementwise(2, noise, tanhs, 20000);
        uint64_t hash = hashed(hashed(hashed(1469598103934665603ull, noise, sizeof noise), tanhs, sizeof tanhs), &best, 8);
        printf("%s %016llx\n", name, (unsigned long long)hash);
    }
    return 0;
}
