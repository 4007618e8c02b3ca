//! Looks up models by name and task.

use std::sync::Arc;

use super::{Kind, Model, Models, ServeError, Service};

impl Models {
    /// Returns the model called `name`, which must embed. Without a name, returns the first model that embeds. The following methods do the
    /// same for other tasks.
    ///
    /// # Errors
    /// Returns an error if there is no model with this name, or if it has another task.
    pub fn embedding(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "embeddings", Service::is_embedding)
    }

    /// Returns a model that computes sparse embeddings.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn sparse(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "sparse embeddings", Service::has_sparse)
    }

    /// Returns a model that scores.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn scoring(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "scores", Service::is_scoring)
    }

    /// Returns a model that computes token vectors for late interaction.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn late(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "vectors of tokens", Service::has_token_vectors)
    }

    /// Returns a model that ranks documents: a model that scores, or else a late-interaction model.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn ranking(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.scoring(name)
            .or_else(|error| self.late(name).map_err(|_| error))
    }

    /// Returns a model that labels tokens.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn tagging(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "labels of tokens", Service::is_tagging)
    }

    /// Returns a model that answers questions about a text.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn answering(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "answers to questions", Service::is_answering)
    }

    /// Returns a model that fills masks.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn filling(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.serving(name, "filled masks", Service::is_filling)
    }

    /// Returns a model that generates text.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn writing(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.with_task(name, "text generation", |model| {
            matches!(&model.kind, Kind::Generation(_))
        })
    }

    /// Returns a model that generates from a source, such as a text to translate.
    ///
    /// # Errors
    /// Returns the errors of [`embedding`](Self::embedding).
    pub fn translating(&self, name: Option<&str>) -> Result<Arc<Model>, ServeError> {
        self.with_task(name, "translations", |model| match &model.kind {
            Kind::Generation(service) => service.has_source(),
            Kind::Service(_) => false,
        })
    }

    /// Returns the model that answers requests for `model` with one of `tasks`. If `model` is a route of a sentence-transformers Router,
    /// returns the model of the Router's route for the first of `tasks` that has a route. Otherwise, or if no task has a route, returns
    /// `model` itself.
    ///
    /// # Errors
    /// Returns an error if the route is not loaded.
    pub fn routed(&self, model: Arc<Model>, tasks: &[&str]) -> Result<Arc<Model>, ServeError> {
        let folder = model.encoder().folder();
        let mut routes = tasks.iter().filter_map(|task| folder.route_for(task));
        let Some(route) = routes.next().filter(|&route| Some(route) != folder.route()) else {
            return Ok(model);
        };
        let all = self.all();
        let of = model.route_of.as_ref().unwrap_or(&model.name);
        let is_it = |other: &&Arc<Model>| {
            (other.route_of.as_ref() == Some(of) || other.name == *of)
                && other.encoder().folder().route() == Some(route)
        };
        all.iter().find(is_it).cloned().ok_or_else(|| {
            let problem = format!(
                "the route `{route}` of the Router of `{}` is not loaded; the server's log has the reason",
                model.name
            );
            ServeError::invalid("model", problem)
        })
    }

    fn serving(
        &self,
        name: Option<&str>,
        asked: &'static str,
        does: impl Fn(&Service) -> bool,
    ) -> Result<Arc<Model>, ServeError> {
        self.with_task(name, asked, |model| match &model.kind {
            Kind::Service(service) => does(service),
            Kind::Generation(_) => false,
        })
    }

    fn with_task(
        &self,
        name: Option<&str>,
        asked: &'static str,
        does: impl Fn(&Model) -> bool,
    ) -> Result<Arc<Model>, ServeError> {
        let model = self.named(name, &does)?;
        match does(&model) {
            true => Ok(model),
            false => Err(model.unsupported(asked)),
        }
    }
}
