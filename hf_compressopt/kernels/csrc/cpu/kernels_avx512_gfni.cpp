#include "vector_avx512.h"

#include "compression.h"
#include "updates.h"
#include "adam.h"
#include "table.h"
