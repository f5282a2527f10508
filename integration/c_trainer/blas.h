/* blas.h - makes OpenBLAS behave; does nothing with another BLAS. */
#ifndef C_TRAINER_BLAS_H
#define C_TRAINER_BLAS_H

/* One thread per rank, and a kernel that fits the processor: OpenBLAS chooses by a table of
 * processor models, and for one that is newer than itself it falls back to code several times
 * slower. In that case the program starts itself again, once, with OPENBLAS_CORETYPE set (it is
 * read when the library is loaded). Call first in main. */
void blas_prepare(char** argv);

/* Name of the kernels in use, "unknown" if the BLAS does not tell. */
const char* blas_kernels(void);

#endif
