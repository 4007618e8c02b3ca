//! Tests of the structure and the wording of the project, and of the functions of the fuzz targets.

mod circles;
mod fuzz;
mod rooms;
