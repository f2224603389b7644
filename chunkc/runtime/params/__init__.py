"""Parameters as users see them: managed tensors, module hooks, gradients that autograd hands over."""
