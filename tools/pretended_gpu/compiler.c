// NVRTC stays the real one: it is told where headers are, and what it compiled for which
// architecture is logged.
#define _GNU_SOURCE
#include "pretended.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOOLKIT "/usr/local/cuda/include"  // what nvFuser names, whatever is there

typedef int (*Compile)(void*, int, const char* const*);

static const char* with_headers(const char* option) {
    const char *at = strstr(option, TOOLKIT), *instead = getenv("PRETENDED_HEADERS");
    char* changed;
    if (!at || !instead) return option;
    if (asprintf(&changed, "%.*s%s%s", (int)(at - option), option, instead, at + strlen(TOOLKIT)) <
        0)
        abort();
    return changed;
}

int nvrtcCompileProgram(void* program, int n, const char* const* options) {
    void* library = dlopen(getenv("PRETENDED_NVRTC"), RTLD_NOW);
    Compile compile = library ? (Compile)dlsym(library, "nvrtcCompileProgram") : NULL;
    if (!compile) fprintf(stderr, "no NVRTC: %s\n", dlerror()), abort();
    const char **changed = malloc(n * sizeof *changed), *architecture = "?";
    for (int i = 0; i < n; i++) {
        changed[i] = with_headers(options[i]);
        if (!strncmp(changed[i], "--gpu-architecture=", 19)) architecture = changed[i] + 19;
    }
    int result = compile(program, n, changed);
    say("%s %s", result ? "refused" : "compiled", architecture);
    return result;
}
