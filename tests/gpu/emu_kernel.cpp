// SPDX-License-Identifier: MIT
// One .cu file for the CPU (see emu_device.h); the build names it.
#include EMU_FILE
