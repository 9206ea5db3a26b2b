// What the parts of the pretended device share: its facts, and the log of what it was asked to do.
#pragma once

enum {
    SHARED_OPTIN = 232448,
    SHARED_ALL = 233472,
    SHARED_PLAIN = 49152,
    REGISTERS = 65536,
    PROCESSORS = 132,
    L2 = 52428800
};

int capability(int part);           // 0: major, 1: minor, of PRETENDED_CAPABILITY, "10.0"
void say(const char* format, ...);  // a line of the log PRETENDED_LOG, if there is one
const char* kernel_name(
    const void* host);  // of a kernel that a library registered with the CUDA runtime
