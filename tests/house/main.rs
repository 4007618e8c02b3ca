//! The structure and the words of the project, and the functions of the fuzz targets.

mod circles;
mod fuzz;
mod rooms;
