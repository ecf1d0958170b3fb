#include "vector_portable.h"

#include "compression.h"
#include "updates.h"
#include "adam.h"
#include "table.h"
