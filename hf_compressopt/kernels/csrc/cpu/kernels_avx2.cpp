#include "vector_avx2.h"

#include "compression.h"
#include "updates.h"
#include "adam.h"
#include "table.h"
