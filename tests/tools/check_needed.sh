#!/bin/sh
# SPDX-License-Identifier: MIT
# check_needed.sh BINARY...: no program may need libcuda to start (the driver is opened at run time).
bad=0
for binary; do
    if readelf -d "$binary" | grep -q 'NEEDED.*lib\(cuda\|cudart\|nvrtc\)'; then
        echo "$binary needs a CUDA library to start"
        bad=1
    fi
done
exit $bad
