// What is compiled: all parts at once, since reading torch's headers takes far longer than the parts.
#include "pace.cpp"
#include "ledger.cpp"
#include "device.cpp"
#include "ops.cpp"
#include "copies.cpp"
#include "autocast.cpp"
#include "bindings.cpp"
